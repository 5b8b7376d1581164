"""Columns to shards: whole rows, whole groups, inside one optimizer step, and what cannot be dealt."""

import copy

import pytest

from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    process_rollout_data_shard,
    split_train_data_by_dp,
    split_train_data_by_dp_raw,
)
from tests.fast.backends.training_utils.layout import mode_namespace, samples_of
from tests.fast.oracle import MODES, Row

LENGTHS = [9, 1, 4, 2, 7, 3, 3, 8]


def rows_of(num_groups=4, per_group=2, rollouts=None):
    rows = []
    for i in range(num_groups * per_group):
        length = LENGTHS[i % len(LENGTHS)]
        mask = [int((i + t) % 4 != 0) for t in range(length)]
        rollout = None if rollouts is None else rollouts[i]
        rows.append(Row.of(mask, [0] * length, group=10 + i // per_group, rollout=rollout))
    return rows


def setup(rows, mode="prompt_mean", **overrides):
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 4, **overrides}
    args = mode_namespace(mode, **sizes)
    return args, convert_samples_to_train_data(args, samples_of(rows), {}, None, None)


def rows_by_step(shards):
    """`[step][rank]` row ids of the shards."""
    steps = []
    for step in range(len(shards[0]["step_row_counts"])):
        steps.append([])
        for shard in shards:
            start = sum(shard["step_row_counts"][:step])
            steps[-1].append(list(shard["sample_indices"][start : start + shard["step_row_counts"][step]]))
    return steps


@pytest.mark.parametrize("balance_data", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_each_row_lands_once_inside_its_step(mode, dp_size, balance_data):
    """Eight rows, four to a step: step 0 is rows 0 to 3 whatever the ranks, step 1 the rest."""
    args, data = setup(rows_of(), mode, balance_data=balance_data)
    shards = split_train_data_by_dp(args, data, dp_size)
    assert len(shards) == dp_size
    steps = rows_by_step(shards)
    assert [sorted(row for rank in step for row in rank) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("balance_data", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_columns_stay_row_by_row(mode, balance_data):
    rows = rows_of()
    args, data = setup(rows, mode, balance_data=balance_data)
    for shard in split_train_data_by_dp(args, data, 2):
        assert list(shard["partition"]) == list(shard["sample_indices"])
        shard = process_rollout_data_shard(args, shard)
        assert "partition" not in shard
        for position, i in enumerate(shard["sample_indices"]):
            assert list(shard["loss_masks"][position]) == list(rows[i].mask)
            assert shard["response_lengths"][position] == rows[i].response_length
            assert shard["total_lengths"][position] == rows[i].total_length == len(shard["tokens"][position])
            for key in ("rewards", "raw_reward", "truncated", "prompt_mask_sums", "prompt_counts", "rollout_counts"):
                if key in data:
                    assert shard[key][position] == data[key][i], key


@pytest.mark.parametrize("balance_data", [False, True])
def test_prompt_mean_keeps_groups_whole_and_spreads_them_evenly(balance_data):
    args, data = setup(rows_of(), balance_data=balance_data)
    for step in rows_by_step(split_train_data_by_dp(args, data, 2)):
        for rank in step:
            assert len(rank) == 2 and rank[0] // 2 == rank[1] // 2, "two rows of one group"


@pytest.mark.parametrize("balance_data", [False, True])
def test_groups_whose_rows_are_apart_are_brought_together(balance_data):
    rows = rows_of()
    order = [0, 2, 1, 3, 7, 5, 4, 6]
    args, data = setup([rows[i] for i in order], balance_data=balance_data)
    for step in rows_by_step(split_train_data_by_dp(args, data, 2)):
        for rank in step:
            assert len({order[i] // 2 for i in rank}) == 1 and len(rank) == 2


def test_balancing_evens_out_the_tokens_of_the_ranks():
    """Four rows of 11, 3, 6, 4 tokens, two to a rank: 14 and 10 (dealt in turn it would be 17 and 7)."""
    args, data = setup(rows_of(), "sample_mean", balance_data=True)
    totals = [row.total_length for row in rows_of()]
    for step in rows_by_step(split_train_data_by_dp(args, data, 2)):
        loads = [sum(totals[i] for i in rank) for rank in step]
        assert abs(loads[0] - loads[1]) <= 4, (step, loads)


def test_rollout_counts_sum_to_the_number_of_rollouts_over_any_shards():
    rollouts = [0, 0, 1, 2, 3, 3, 4, 4]
    rows = rows_of(rollouts=rollouts)
    args, data = setup(
        rows, "sample_mean", global_batch_size=5, n_samples_per_prompt=1, rollout_batch_size=5, balance_data=True
    )
    shards = split_train_data_by_dp(args, data, 2)
    assert sum(sum(shard["rollout_counts"]) for shard in shards) == 5
    assert sorted(i for shard in shards for i in shard["sample_indices"]) == list(range(8))


def test_a_step_is_counted_in_rollouts_in_order_of_first_appearance():
    """Two rollouts a step: rows 0, 1, 4 are rollouts 7 and 3; rows 2, 3, 5 are 9 and 1."""
    rollouts = [7, 3, 9, 1, 7, 1]
    rows = [Row.of([1] * (1 + i), [0] * (1 + i), group=0, rollout=r) for i, r in enumerate(rollouts)]
    args, data = setup(rows, "sample_mean", global_batch_size=2, n_samples_per_prompt=4, rollout_batch_size=1)
    steps = rows_by_step(split_train_data_by_dp(args, data, 2))
    assert [sorted(row for rank in step for row in rank) for step in steps] == [[0, 1, 4], [2, 3, 5]]


def test_fewer_rows_than_ranks_leave_a_rank_empty_outside_prompt_mean():
    rows = rows_of(num_groups=1)
    args, data = setup(rows, "token_mean", global_batch_size=2, rollout_batch_size=1)
    shards = split_train_data_by_dp(args, data, 3)
    assert sorted(len(shard["tokens"]) for shard in shards) == [0, 1, 1]
    assert all(len(shard["step_row_counts"]) == 1 for shard in shards)


def test_the_split_repeats_and_leaves_its_input_alone():
    args, data = setup(rows_of(), balance_data=True)
    before = copy.deepcopy({key: column for key, column in data.items() if key != "total_lengths"})
    first, second = (split_train_data_by_dp_raw(args, data, dp_size=2) for _ in range(2))
    assert first == second == split_train_data_by_dp(args, data, 2)
    assert {key: data[key] for key in before} == before


def drop(key, position):
    def change(data):
        data[key] = data[key][:position] + data[key][position + 1 :]

    return change


def assign(key, position, value):
    def change(data):
        data[key] = [*data[key]]
        data[key][position] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("prompt_mask_sums", 3), "one prompt_mask_sums entry per sample"),
        (lambda data: data["prompt_mask_sums"].append(3), "one prompt_mask_sums entry per sample"),
        (assign("prompt_mask_sums", 3, 99), "inconsistent prompt_mask_sums"),
    ],
)
def test_broken_group_totals(change, message):
    args, data = setup(rows_of())
    change(data)
    with pytest.raises(ValueError, match=message):
        split_train_data_by_dp(args, data, 2)


def test_groups_that_cannot_be_spread_evenly():
    """Two groups a step over three ranks."""
    args, data = setup(rows_of())
    with pytest.raises(ValueError, match="divisible by dp_size"):
        split_train_data_by_dp(args, data, 3)


def test_a_group_that_straddles_a_step():
    """Rows in the order 0, 1, 2, 4 | 3, 5, 6, 7: groups 1 and 2 are in both steps."""
    rows = rows_of()
    args, data = setup([rows[i] for i in (0, 1, 2, 4, 3, 5, 6, 7)])
    with pytest.raises(ValueError, match="straddle an optimizer-step boundary"):
        split_train_data_by_dp(args, data, 1)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "prompt_mean"])
def test_other_modes_may_split_a_group_over_steps_and_ranks(mode):
    rows = rows_of()
    args, data = setup([rows[i] for i in (0, 1, 2, 4, 3, 5, 6, 7)], mode)
    assert len(split_train_data_by_dp(args, data, 3)) == 3


def test_a_step_without_active_token_is_named():
    """The second of two steps is masked throughout; the rollout as a whole is not."""
    rows = rows_of()
    masked = [Row.of([0] * row.response_length, row.values, group=row.group) for row in rows[4:]]
    args, data = setup(rows[:4] + masked, "token_mean")
    with pytest.raises(ValueError, match="at least one active token"):
        split_train_data_by_dp(args, data, 2)
    for mode in ("sample_mean", "prompt_mean", "constant"):
        split_train_data_by_dp(*setup(rows[:4] + masked, mode), 2)
