"""Columns that the whole of a step tells: the quarter of a sample's length, the first row of a prompt in its step."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.ray.rollout.step_columns import add_step_columns, length_quarters
from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    split_train_data_by_dp,
    validate_train_data,
)
from miles.utils.errors import UserError
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, samples_of
from tests.fast.oracle import MODES, Row


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
