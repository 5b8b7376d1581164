"""How rollouts are split into steps, against a search over all boundaries in fractions, and what steps tell of rows.

The columns are the quarter of a sample's length, and the first row of a prompt in its step.
"""

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.ray.rollout.steps import add_step_columns, fixed_steps, length_quarters, ragged_steps
from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    split_train_data_by_dp,
    validate_train_data,
)
from miles.utils.errors import UserError
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, samples_of
from tests.fast.oracle import MODES, Row


def columns(groups):
    """`[group][rollout] -> number of rows` as the rollout and the group of each row."""
    rollouts, units = [], []
    for group, sizes in enumerate(groups):
        for place, num_rows in enumerate(sizes):
            rollouts += [(group, place)] * num_rows
            units += [group] * num_rows
    return rollouts, units


def groups_by_step(groups, global_batch_size):
    """The groups of each step."""
    rollouts, units = columns(groups)
    steps = ragged_steps(rollouts, units, global_batch_size)
    return [list(dict.fromkeys(units[row] for row in step)) for step in steps]


@pytest.mark.parametrize(
    ("sizes", "batch", "expected"),
    [
        # 8 rollouts, 2 steps, cut nearest to 4: after 3 + 1.
        ([3, 1, 2, 2], 4, [[0, 1], [2, 3]]),
        # 10 rollouts, round(10 / 4) = round(2.5) = 3 steps, cuts nearest to 3.33 and 6.67: after 3 and after 3 + 3.
        ([3, 3, 4], 4, [[0], [1], [2]]),
        # 9 rollouts, round(2.25) = 2 steps, cut nearest to 4.5: 4 and 5 are equally near, the lower is taken.
        ([4, 1, 4], 4, [[0], [1, 2]]),
        # 5 rollouts of one group are one step, whatever the batch.
        ([5], 2, [[0]]),
        # 1 rollout, round(1 / 4) = 0: still one step.
        ([1], 4, [[0]]),
        # 12 rollouts, 3 steps, cuts nearest to 4 and 8 would both be after the first group: the second moves on.
        ([10, 1, 1], 4, [[0], [1], [2]]),
        # 12 rollouts, 3 steps, cuts nearest to 4 and 8: after 2 and after 12, which leaves nothing; both move back.
        ([1, 1, 10], 4, [[0], [1], [2]]),
        # 11 rollouts, round(11 / 2) = 6 steps, but three groups only.
        ([1, 1, 9], 2, [[0], [1], [2]]),
    ],
)
def test_cuts_by_hand(sizes, batch, expected):
    assert groups_by_step([[1] * size for size in sizes], batch) == expected


def test_a_rollout_of_several_rows_counts_once():
    """Four rollouts of 5, 1, 1, 1 rows in groups of one: two steps of two rollouts."""
    assert groups_by_step([[5], [1], [1], [1]], 2) == [[0, 1], [2, 3]]


def test_the_rows_of_a_unit_are_brought_together():
    """Groups 0 and 2 are apart; they go where they first appear, rows in the order of the stream."""
    assert ragged_steps(range(6), [0, 2, 0, 1, 2, 1], 2) == [[0, 2], [1, 4], [3, 5]]


def test_whole_batches_of_single_rollouts_are_the_fixed_steps():
    for num_rollouts, batch in [(8, 4), (6, 2), (5, 5), (4, 1)]:
        rollouts = [i % num_rollouts for i in range(2 * num_rollouts)]
        assert ragged_steps(rollouts, rollouts, batch) == fixed_steps(rollouts, batch)


def nearest_cut(ends, target, first, last):
    """The boundary (number of units before it) in first..last that is nearest to the target, the lowest of several."""
    return min(range(first, last + 1), key=lambda cut: (abs(ends[cut] - target), cut))


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_any_groups(groups, batch):
    rollouts, units = columns(groups)
    steps = ragged_steps(rollouts, units, batch)
    assert all(steps) and sorted(row for step in steps for row in step) == list(range(len(rollouts)))
    by_step = groups_by_step(groups, batch)
    assert [group for step in by_step for group in step] == list(range(len(groups))), "whole, consecutive"
    num_rollouts = sum(map(len, groups))
    num_steps = min(max(1, floor(Fraction(num_rollouts, batch) + Fraction(1, 2))), len(groups))
    assert len(by_step) == num_steps
    ends = [sum(map(len, groups[:cut])) for cut in range(len(groups) + 1)]
    cut = 0
    for k, step in enumerate(by_step[:-1], start=1):
        # Each later step needs a unit, as this one does.
        cut = nearest_cut(ends, Fraction(k * num_rollouts, num_steps), cut + 1, len(groups) - (num_steps - k))
        assert step[-1] + 1 == cut


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(1, 10))
def test_steps_stay_near_the_batch(sizes, batch):
    """Without moved cuts, a step is off by half a group at each end from R / S, itself within a third of the batch."""
    num_rollouts = sum(sizes)
    by_step = groups_by_step([[1] * size for size in sizes], batch)
    target = num_rollouts / len(by_step)
    if batch >= 2 * max(sizes):
        for step in by_step:
            assert abs(sum(sizes[group] for group in step) - target) <= max(sizes)
        assert num_rollouts < batch or 2 / 3 * batch <= target < 1.5 * batch


def test_many_single_rollouts_are_cut_in_linear_time():
    assert ragged_steps(range(20000), range(20000), 1) == [[row] for row in range(20000)]


# ---- columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths, quarters",
    [
        ([], []),
        ([7], [3]),
        ([9, 7], [3, 1]),
        ([3, 1, 2], [3, 1, 2]),
        ([10, 40, 30, 20], [0, 3, 2, 1]),
        # Ranks 0 to 4 in ascending length: 3 - floor(4 (4 - rank) / 5) = 0, 1, 2, 3, 3.
        ([5, 1, 4, 2, 3], [3, 0, 3, 1, 2]),
        # Of equal lengths the earlier is the shorter.
        ([2, 2, 2, 2], [0, 1, 2, 3]),
        ([0, 9, 0, 9, 0, 9, 0, 9], [0, 2, 0, 2, 1, 3, 1, 3]),
    ],
)
def test_quarters(lengths, quarters):
    assert length_quarters(lengths) == quarters


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_quarter_holds_those_of_whom_less_than_so_many_are_longer(lengths):
    quarters = length_quarters(lengths)
    for place, (length, quarter) in enumerate(zip(lengths, quarters, strict=True)):
        longer = sum((other, where) > (length, place) for where, other in enumerate(lengths))
        assert Fraction(3 - quarter, 4) <= Fraction(longer, len(lengths)) < Fraction(4 - quarter, 4)
    sizes = [quarters.count(quarter) for quarter in range(4)]
    assert 3 in quarters and max(sizes) - min(sizes) <= 1


ROLLOUTS = [5, 5, 9, 9, 3, 5, 8]
GROUPS = [2, 2, 2, 2, 7, 2, 7]
LENGTHS = [1, 4, 3, 3, 2, 3, 1]
"""Rollouts 5, 9, 3 and 8 have 8, 6, 2 and 1 tokens; steps of two rollouts hold 5 and 9, 3 and 8."""
ROWS = [
    Row.of([(i + t) % 2 for t in range(length)], [0] * length, group=group, rollout=rollout)
    for i, (length, group, rollout) in enumerate(zip(LENGTHS, GROUPS, ROLLOUTS, strict=True))
]


def arguments(mode="sample_mean", **overrides):
    sizes = {**batch_sizes(ROWS), "global_batch_size": 2, "prompt_groups": "complete"}
    return mode_namespace(mode, **sizes | overrides)


def test_rows_of_a_rollout_share_its_quarter_inside_its_step():
    data = {"tokens": [[0]] * 7, "response_lengths": LENGTHS, "rollout_ids": ROLLOUTS}
    add_step_columns(data, [[0, 1, 2, 3, 5], [4, 6]])
    assert data["length_quarters"] == [3, 3, 1, 1, 3, 3, 1]
    assert "step_prompt_counts" not in data


def test_a_prompt_counts_once_in_each_step_that_it_is_in():
    data = {"tokens": [[0]] * 6, "sample_group_indices": [4, 4, 1, 1, 4, "x"]}
    add_step_columns(data, [[0, 1, 2], [3, 4, 5]])
    assert data["step_prompt_counts"] == [1, 0, 1, 1, 1, 1]
    assert "length_quarters" not in data


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_shards_carry_them_in_every_mode(mode, dp_size):
    args = arguments(mode, n_samples_per_prompt=2, prompt_groups="ragged" if mode == "prompt_mean" else "complete")
    data = convert_samples_to_train_data(args, samples_of(ROWS), {}, None, None)
    needs_groups = mode == "prompt_mean"
    assert ("prompt_group_indices" in data, "sample_group_indices" in data) == (needs_groups, not needs_groups)
    shards = split_train_data_by_dp(args, data, dp_size)
    for name, expected in (("length_quarters", [3, 3, 1, 1, 3, 3, 1]), ("step_prompt_counts", [1, 0, 0, 0, 1, 0, 0])):
        found = {row: x for shard in shards for row, x in zip(shard["partition"], shard[name], strict=True)}
        assert [found[row] for row in range(7)] == expected
        assert name not in data, "the data is left as it was"


def test_a_sample_without_a_group_leaves_groups_out():
    samples = samples_of(ROWS)
    for sample in samples:
        sample.group_index = None if sample.rollout_id == 8 else sample.group_index
    data = convert_samples_to_train_data(arguments(rewards_normalization=False), samples, {}, None, None)
    assert "sample_group_indices" not in data
    assert "step_prompt_counts" not in split_train_data_by_dp(arguments(), data, 1)[0]


@pytest.mark.parametrize("name", ["length_quarters", "step_prompt_counts"])
def test_a_conversion_may_not_use_their_names(name):
    data = convert_samples_to_train_data(arguments(), samples_of(ROWS), {}, None, None)
    with pytest.raises(UserError, match=f"train data has columns {name}, names that training uses"):
        validate_train_data(arguments(), {**data, name: [0] * 7}, dp_size=1)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([1] * 6, "sample_group_indices for each of 7 rows, got 6"),
        ([1] * 6 + [[]], r"sample 6 has sample_group_indices \[\]"),
    ],
)
def test_groups_of_a_conversion_are_checked(groups, said):
    data = convert_samples_to_train_data(arguments(), samples_of(ROWS), {}, None, None)
    with pytest.raises(UserError, match=said):
        validate_train_data(arguments(), {**data, "sample_group_indices": groups}, dp_size=1)
