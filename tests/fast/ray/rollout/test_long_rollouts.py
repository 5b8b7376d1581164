"""16,384 rows of real lengths: ranks are evenly loaded, and no list of tokens is copied on the way to them."""

import pytest

from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    process_rollout_data_shard,
    split_train_data_by_dp,
    validate_train_data,
)
from miles.utils.seqlen_balancing import get_seqlen_balanced_partitions
from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.length_mix import SAMPLES_PER_PROMPT, length_mix, mixed_samples

NUM_SAMPLES, NUM_RANKS = 16_384, 64
MOST_OVER_MEAN = 1.02


@pytest.mark.parametrize("together", [1, SAMPLES_PER_PROMPT], ids=["samples", "prompt groups"])
@pytest.mark.parametrize("longest", [None, 8192, 32_768])
def test_the_fullest_rank_has_hardly_more_than_the_mean(together, longest):
    lengths = [total for total, _ in length_mix(NUM_SAMPLES, longest=longest)]
    units = [sum(lengths[start : start + together]) for start in range(0, len(lengths), together)]
    loads = [sum(units[i] for i in part) for part in get_seqlen_balanced_partitions(units, NUM_RANKS)]
    assert sum(loads) == sum(lengths)
    assert max(loads) <= MOST_OVER_MEAN * sum(loads) / NUM_RANKS


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean"])
def test_token_lists_are_handed_on_and_not_copied(mode):
    samples = mixed_samples(64)
    for sample in samples:
        sample.loss_weights = [0.5] * sample.response_length
    args = mode_namespace(mode, n_samples_per_prompt=SAMPLES_PER_PROMPT, global_batch_size=32, balance_data=True)
    data = convert_samples_to_train_data(args, samples, {}, None, None)
    validate_train_data(args, data, dp_size=4)
    shards = split_train_data_by_dp(args, data, 4)
    seen = []
    for shard in shards:
        process_rollout_data_shard(args, shard)
        for row, index in enumerate(shard["sample_indices"]):
            assert shard["tokens"][row] is samples[index].tokens
            assert shard["loss_masks"][row] is samples[index].loss_mask
            assert shard["rollout_log_probs"][row] is samples[index].rollout_log_probs
            assert shard["loss_weights"][row] is samples[index].loss_weights
            seen.append(index)
    assert sorted(seen) == list(range(len(samples)))
