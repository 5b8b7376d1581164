"""Where ragged rollouts are cut into steps, against a search over all boundaries in fractions."""

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.ray.rollout.step_cut import fixed_steps, ragged_steps


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
