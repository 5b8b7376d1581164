"""The parts of the loop that need no process group."""

from argparse import Namespace

import pytest

from miles.training_loop import check_rows_fit_model, is_save_due, make_shard
from miles.utils.errors import UserError
from tests.fast.backends.experimental.fsdp_utils.rollouts import VOCAB_SIZE, make_args, make_samples


def test_rows_longer_than_the_positions():
    args = Namespace(max_position_embeddings=4)
    check_rows_fit_model(args, [[1, 2, 3, 4]], vocab_size=5)
    with pytest.raises(UserError, match=r"sample 1 has 5 tokens, more than the model's 4 positions; .* to at least 6"):
        check_rows_fit_model(args, [[1], [1] * 5, [1] * 6], vocab_size=5)


@pytest.mark.parametrize("tokens, words", [([0, 5], "from 0 to 5; allowed are 0 to 4"), ([-1, 3], "from -1 to 3")])
def test_tokens_outside_the_vocabulary(tokens, words):
    with pytest.raises(UserError, match=f"sample 0 has token ids {words}.*--tokenizer-type"):
        check_rows_fit_model(Namespace(max_position_embeddings=4), [tokens], vocab_size=5)


@pytest.mark.parametrize(
    "save, interval, due",
    [(None, None, []), ("x", None, [6]), ("x", 1, [0, 1, 2, 3, 4, 5, 6]), ("x", 3, [2, 5, 6]), ("x", 9, [6])],
)
def test_when_a_checkpoint_is_due(save, interval, due):
    args = Namespace(save=save, save_interval=interval, num_rollout=7)
    assert [rollout_id for rollout_id in range(7) if is_save_due(args, rollout_id)] == due


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_hold_every_row_once(size):
    samples = make_samples(0)
    shards = [
        make_shard(make_args(), samples, Namespace(rank=rank, size=size), vocab_size=VOCAB_SIZE)
        for rank in range(size)
    ]
    assert sorted(index for shard in shards for index in shard["sample_indices"]) == list(range(len(samples)))


def test_ragged_shards_of_a_filtered_rollout():
    """Thirteen of sixteen samples are left, eight to a step: round(1.625) = 2 steps, over any number of ranks."""
    samples = [sample for sample in make_samples(0) if sample.index not in (3, 8, 9)]

    def shards_of(size, *options):
        ranks = [Namespace(rank=rank, size=size) for rank in range(size)]
        return [make_shard(make_args(*options), samples, rank, vocab_size=VOCAB_SIZE) for rank in ranks]

    for size in (1, 3):
        shards = shards_of(size, "--prompt-groups", "ragged", "--loss-aggregation", "prompt_mean")
        assert sorted(index for shard in shards for index in shard["sample_indices"]) == [s.index for s in samples]
        # Groups of 2, 1, 2, 2, 2, 2, 2 samples, cut nearest to 6.5: 7 and 6.
        assert [sum(shard["step_row_counts"][step] for shard in shards) for step in range(2)] == [7, 6]
    with pytest.raises(UserError, match="complete prompt groups"):
        shards_of(1, "--loss-aggregation", "prompt_mean")
    with pytest.raises(UserError, match=r"13 samples, which is not a multiple of global_batch_size 8; .*ragged"):
        shards_of(1)


def test_custom_conversion_and_rewards_are_called(monkeypatch):
    args = make_args()
    args.custom_reward_post_process_path = f"{__name__}.constant_rewards"
    world = Namespace(rank=0, size=1)
    assert set(make_shard(args, make_samples(0), world, vocab_size=VOCAB_SIZE)["rewards"]) == {2.5}
    args.custom_convert_samples_to_train_data_path = f"{__name__}.convert_first_eight"
    shard = make_shard(args, make_samples(0), world, vocab_size=VOCAB_SIZE)
    assert shard["rewards"] == [0.5] * 8


def constant_rewards(args, samples):
    return [0.0] * len(samples), [2.5] * len(samples)


def convert_first_eight(args, samples):
    return {
        "tokens": [[1, 2]] * 8,
        "response_lengths": [1] * 8,
        "loss_masks": [[1]] * 8,
        "rewards": [0.5] * 8,
    }
