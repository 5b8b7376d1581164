"""`--prompt-groups ragged`: rollouts of any size, groups of any size, any number of ranks, in every mode."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    split_train_data_by_dp,
    validate_train_data,
)
from miles.utils.errors import UserError
from tests.fast import oracle
from tests.fast.backends.training_utils import harness
from tests.fast.backends.training_utils.layout import mode_namespace, samples_of
from tests.fast.backends.training_utils.pipeline import run_pipeline
from tests.fast.oracle import MODES, Row


def rows_of(groups):
    """`[group][rollout] -> number of rows` as rows of unequal lengths and values, one of them masked throughout."""
    rows, rollout = [], 0
    for group, sizes in enumerate(groups):
        for num_rows in sizes:
            for _ in range(num_rows):
                i = len(rows)
                mask = [0] * 3 if i == 1 else [1] + [int((i + t) % 3 != 0) for t in range(i % 4)]
                values = [0.25 * ((5 * i + 3 * t) % 7) - 0.5 for t in range(len(mask))]
                rows.append(Row.of(mask, values, group=20 + group, rollout=7 * rollout + 1))
            rollout += 1
    return rows


def arguments(mode, batch, **overrides):
    # Neither the number of prompts nor the size of a group has to fit the rollout.
    sizes = {"rollout_batch_size": 5, "n_samples_per_prompt": 4, "global_batch_size": batch}
    return mode_namespace(mode, **{"prompt_groups": "ragged", **sizes, **overrides})


def split(args, rows, dp_size):
    data = convert_samples_to_train_data(args, samples_of(rows), {}, None, None)
    validate_train_data(args, data, dp_size=dp_size)
    return split_train_data_by_dp(args, data, dp_size)


def rows_by_step(shards):
    """`[step][rank]` row ids."""
    steps = []
    for step in range(len(shards[0]["step_row_counts"])):
        starts = [sum(shard["step_row_counts"][:step]) for shard in shards]
        steps.append(
            [
                shard["partition"][start : start + shard["step_row_counts"][step]]
                for shard, start in zip(shards, starts, strict=True)
            ]
        )
    return steps


UNEVEN = [[1, 1], [1], [1, 1, 1], [1]]
"""Seven rollouts in groups of 2, 1, 3 and 1."""


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_that_complete_refuses(mode):
    """Seven rollouts, four to a step: round(1.75) = 2 steps. Groups are cut nearest to 3.5 at 3; rollouts at 3 too."""
    steps = rows_by_step(split(arguments(mode, 4), rows_of(UNEVEN), 3))
    assert [sorted(row for rank in step for row in rank) for step in steps] == [[0, 1, 2], [3, 4, 5, 6]]
    # Rollouts are dealt in turn: the group of rows 3 to 5 is on three ranks.
    assert steps[1] == [[3, 6], [4], [5]]
    with pytest.raises(UserError, match=r"complete prompt groups|not a multiple of global_batch_size 4"):
        split(arguments(mode, 4, prompt_groups="complete"), rows_of(UNEVEN), 1)


@pytest.mark.parametrize("mode", MODES)
def test_groups_decide_the_cut_in_every_mode(mode):
    """Five rollouts in groups of 4 and 1, two to a step: round(2.5) = 3 steps, but 2 groups make 2."""
    rows = rows_of([[1] * 4, [1]])
    assert rows_by_step(split(arguments(mode, 2), rows, 1)) == [[[0, 1, 2, 3]], [[4]]]


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_smaller_than_a_step_is_one_step_and_leaves_ranks_empty(mode):
    steps = rows_by_step(split(arguments(mode, 64, balance_data=True), rows_of([[1], [2]]), 4))
    assert [sorted(map(len, step)) for step in steps] == [[0, 0, 1, 2]]


@pytest.mark.parametrize("mode", MODES)
@given(
    groups=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=6),
    batch=st.integers(1, 9),
    dp_size=st.integers(1, 4),
    balance=st.booleans(),
)
def test_steps_hold_whole_units_and_ranks_whole_rollouts(mode, groups, batch, dp_size, balance):
    rows = rows_of(groups)
    if mode == "token_mean":  # which refuses a step without an active token; the cut is the same in every mode
        cut = rows_by_step(split(arguments("sample_mean", batch), rows, 1))
        assume(all(any(any(rows[row].mask) for row in step[0]) for step in cut))
    steps = rows_by_step(split(arguments(mode, batch, balance_data=balance), rows, dp_size))
    place = {row: (step, rank) for step, ranks in enumerate(steps) for rank, part in enumerate(ranks) for row in part}
    assert sorted(place) == list(range(len(rows)))
    assert all(any(step) for step in steps)
    for members in oracle.rollouts(rows):
        assert len({place[row] for row in members}) == 1
    if mode == "prompt_mean":
        for members in oracle.groups(rows):
            assert len({place[row][0] for row in members}) == 1


@pytest.mark.parametrize("dp_size", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_each_step_has_its_own_value(mode, dp_size):
    """Through schedule, loss and metrics, with groups and rollouts that differ in size from step to step."""
    rows = rows_of([[1, 2], [1], [2, 1, 1], [3], [1, 1, 1], [1]])
    args = arguments(mode, 4, micro_batch_size=2, **harness.LINEAR)
    divisor = args.loss_aggregation_divisor
    steps = run_pipeline(args, rows, dp_size)
    assert len(steps) == 3 and len({len(ids) for ids, _ in steps}) > 1
    for ids, outcome in steps:
        expected = float(oracle.value([rows[i] for i in ids], mode, divisor))
        assert outcome.value == pytest.approx(expected, rel=3e-6)
        assert outcome.metrics["loss"] == pytest.approx(expected, rel=3e-6)


def test_a_masked_step_of_token_mean_is_still_refused():
    rows = [Row.of([1, 1], [1, 2], group=0), Row.of([0], [1], group=1), Row.of([0, 0], [1, 2], group=1)]
    with pytest.raises(UserError, match=r"at least one active token .*step 1 \(2 samples\) has none"):
        split(arguments("token_mean", 2, rewards_normalization=False), rows, 1)
