"""What training logs of the data of each step, where it is by hand, or nothing."""

import pytest
import torch

from miles.backends.experimental.fsdp_utils.actor import FSDPTrainActor
from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.backends.training_utils import data as data_room
from miles.backends.training_utils.step_weights import describe_steps
from miles.ray.rollout.train_data_conversion import process_rollout_data_shard, split_train_data_by_dp
from miles.training_loop import make_shard
from miles.utils.errors import RankError
from tests.fast import oracle
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks, run_ranks_to_errors
from tests.fast.backends.experimental.fsdp_utils.rollouts import (
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    make_args,
    make_samples,
    mode_options,
)
from tests.fast.backends.training_utils.described import EXACT, EXAMPLE, expected_description, train_data, walk
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace
from tests.fast.backends.training_utils.meetings import World


def as_row(sample):
    return oracle.Row.of(sample.loss_mask, [0] * sample.response_length, group=sample.group_index)


def train(args, samples):
    """The metrics of a rollout's steps on this rank."""
    with fsdp_world() as world:
        actor = FSDPTrainActor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=PAD_TOKEN_ID)
        return list(actor.train(0, make_shard(args, samples, world, vocab_size=VOCAB_SIZE)))


@pytest.mark.parametrize("mode", oracle.MODES)
def test_training_logs_them(mode):
    samples = make_samples(0)
    args = make_args(*mode_options(mode))

    parts = [list(map(as_row, samples[start : start + 8])) for start in (0, 8)]
    expected = [expected_description(args, part, oracle.DEFAULT) for part in parts]
    assert expected[0]["num_masked_samples"] > 0 and expected[0] != expected[1]
    for logged in run_ranks(lambda: train(args, samples), 2):
        for step, wanted in zip(logged, expected, strict=True):
            assert {name: step[f"train/{name}"] for name in wanted} == pytest.approx(wanted, rel=EXACT)


def scalar_of_few_rows(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Stands the trial on two rows, and breaks its contract on more of them."""
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum() if len(loss_masks) <= 2 else values * mask


def test_a_reducer_that_breaks_its_contract_on_one_rank_is_named_there():
    args = make_args("--custom-pg-loss-reducer-function-path", f"{__name__}.{scalar_of_few_rows.__name__}")
    (error,) = run_ranks_to_errors(lambda: train(args, make_samples(0)), 1)
    assert isinstance(error, RankError) and "scalar_of_few_rows must return a scalar tensor" in str(error)


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "constant"])
def test_a_step_of_masked_samples_has_no_weight(mode):
    rows = [oracle.remask(row, [0] * row.response_length) for row in EXAMPLE]
    args = mode_namespace(mode, **batch_sizes(rows))
    for (described,), weights in walk(args, rows, World(2, 1)):
        assert described == {
            "num_tokens": 0,
            "num_kept_tokens": 0,
            "num_counted_tokens": 0,
            "num_samples": 4,
            "num_prompts": 2,
            "num_masked_samples": 4,
            "effective_samples": 0.0,
            "longest_quarter_weight": 0.0,
        }
        assert set(weights.values()) == {0.0}


def test_what_a_shard_does_not_tell_is_not_said():
    """A shard that was not split here has no quarters, and a rollout with a sample without a group no prompts."""
    args = mode_namespace("sample_mean", **batch_sizes(EXAMPLE))
    data = train_data(args, EXAMPLE)
    del data["sample_group_indices"]
    (shard,) = split_train_data_by_dp(args, data, 1)
    del shard["length_quarters"]
    batch = data_room.move_to_device(process_rollout_data_shard(args, shard), "cpu")
    (iterator,), num_microbatches = data_room.get_data_iterator(args, None, batch)
    (described,) = describe_steps(args, batch, iterator, num_microbatches)
    tokens = dict.fromkeys(("num_tokens", "num_kept_tokens", "num_counted_tokens"), 10)
    assert described == {**tokens, "num_samples": 4, "num_masked_samples": 0, "effective_samples": 4.0}


def test_groups_that_lie_in_two_steps_are_prompts_of_both():
    """Eight samples of four groups of two, the first group's second sample at the end; steps of four samples."""
    groups = [0, 1, 1, 2, 2, 3, 3, 0]
    rows = [oracle.Row.of([1] * (i + 1), [0] * (i + 1), group=group) for i, group in enumerate(groups)]
    args = mode_namespace("sample_mean", **{**batch_sizes(rows), "global_batch_size": 4})
    for described, _ in walk(args, rows, World(3, 1)):
        assert [step["num_prompts"] for step in described] == [3, 3]
        # Lengths 1 to 4 and 5 to 8: the longest quarter is one of four equal samples.
        assert [step["longest_quarter_weight"] for step in described] == pytest.approx([0.25, 0.25])
