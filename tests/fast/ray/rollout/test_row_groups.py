"""Rows that belong together: rollouts of several rows and prompt groups, their ids, counts, totals and indices."""

import copy

import pytest

from miles.ray.rollout.row_groups import add_indices
from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    split_train_data_by_dp,
    split_train_data_by_dp_raw,
    validate_train_data,
)
from miles.utils.errors import UserError
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, samples_of
from tests.fast.oracle import MODES, Row

ROLLOUTS = [5, 5, 9, 9, 3, 5]
GROUPS = [2, 2, 2, 2, 7, 2]
MASKS = [[1, 0], [1, 1, 1], [0], [1, 1], [1, 0, 1], [1]]
ROWS = [
    Row.of(mask, [0] * len(mask), group=group, rollout=rollout)
    for mask, group, rollout in zip(MASKS, GROUPS, ROLLOUTS, strict=True)
]


def factory_with_context(total_lengths, response_lengths, loss_masks, calculate_per_token_loss, *, context):
    raise AssertionError("conversion and split only look at its signature")


def factory_without_context(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    raise AssertionError("conversion and split only look at its signature")


def arguments(mode="sample_mean", **overrides):
    return mode_namespace(mode, **{**batch_sizes(ROWS), "prompt_groups": "complete", **overrides})


def convert(args, rows=ROWS, **changes):
    samples = samples_of(rows)
    for row, group in changes.get("groups", {}).items():
        samples[row].group_index = group
    return convert_samples_to_train_data(args, samples, {}, None, None)


def columns(**changes):
    """What a custom conversion may return: three rollouts of 3, 2 and 1 rows, in two groups."""
    data = {
        "tokens": [[1] * (2 + len(mask)) for mask in MASKS],
        "response_lengths": [len(mask) for mask in MASKS],
        "loss_masks": copy.deepcopy(MASKS),
        "rewards": [0.5, 0.5, 1.0, 1.0, 0.0, 0.5],
        "rollout_ids": ["a", "a", "b", "b", "c", "a"],
    }
    return {key: value for key, value in {**data, **changes}.items() if value is not None}


def test_indices_number_rollouts_and_groups_by_first_appearance():
    data = columns(prompt_group_indices=[4, 4, 4, 4, 1, 4])
    add_indices(data)
    assert data["rollout_indices"] == [0, 0, 1, 1, 2, 0]
    assert data["prompt_indices"] == [0, 0, 0, 0, 1, 0]


def test_indices_of_rows_that_are_rollouts():
    data = columns(rollout_ids=None)
    add_indices(data)
    assert data["rollout_indices"] == [0, 1, 2, 3, 4, 5] and "prompt_indices" not in data


def by_row(shards, key):
    return [value for _, value in sorted((i, v) for s in shards for i, v in zip(s["partition"], s[key], strict=True))]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["sample_mean", "token_mean", "constant"])
def test_the_split_fills_in_what_ids_imply(mode, dp_size):
    """Rollout a has 1 + 3 + 1 active tokens, b 0 + 2, c 2."""
    data = columns()
    before = copy.deepcopy(data)
    shards = split_train_data_by_dp(arguments(mode), data, dp_size)
    assert by_row(shards, "rollout_counts") == [1, 0, 1, 0, 1, 0]
    assert by_row(shards, "rollout_mask_sums") == [5, 5, 2, 2, 2, 5]
    assert by_row(shards, "rollout_indices") == [0, 0, 1, 1, 2, 0]
    assert {key: data[key] for key in before} == before
    assert "prompt_indices" not in shards[0]


def test_the_split_keeps_counts_and_totals_that_are_given():
    given = {"rollout_counts": [0, 1, 1, 0, 1, 0], "rollout_mask_sums": [5, 5, 2, 2, 2, 5]}
    shards = split_train_data_by_dp(arguments(), columns(**given), 2)
    assert {key: by_row(shards, key) for key in given} == given


def test_prompt_columns_of_a_custom_conversion():
    groups = {"prompt_group_indices": [4, 4, 4, 4, 1, 4]}
    args = arguments("prompt_mean", prompt_groups="ragged")
    shards = split_train_data_by_dp(args, columns(**groups, prompt_mask_sums=[7, 7, 7, 7, 2, 7]), 2)
    assert by_row(shards, "prompt_counts") == [1, 0, 0, 0, 1, 0]
    assert by_row(shards, "prompt_indices") == [0, 0, 0, 0, 1, 0]
    with pytest.raises(UserError, match=r"one prompt_mask_sums entry per sample \(6\), got none"):
        split_train_data_by_dp(args, columns(**groups), 2)
    with pytest.raises(UserError, match="needs prompt_group_indices"):
        split_train_data_by_dp(args, columns(), 2)
    # Where no mode reads them they are complete all the same, for a reducer that may.
    shards = split_train_data_by_dp(arguments(), columns(**groups), 2)
    assert by_row(shards, "prompt_mask_sums") == [7, 7, 7, 7, 2, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_mask_sums": [5, 5, 2, 2, 2]}, r"one rollout_mask_sums entry per sample \(6\), got 5"),
        (
            {"rollout_mask_sums": [5, 4, 2, 2, 2, 5]},
            "inconsistent rollout_mask_sums in rollout a: 4, .* have 5 active tokens; every row",
        ),
        ({"rollout_counts": [1, 1, 1, 0, 1, 0]}, "rollout_counts of rollout a add up to 2; put 1 on one row of each"),
        ({"rollout_counts": [1, 0, 0, 0, 1, 0]}, "rollout_counts of rollout b add up to 0"),
        (
            {"prompt_group_indices": [4, 4, 4, 4, 1, 4], "prompt_counts": [1, 0, 1, 0, 1, 0]},
            "prompt_counts of prompt group 4 add up to 2",
        ),
    ],
)
def test_counts_and_totals_that_contradict_the_ids(changes, message):
    with pytest.raises(UserError, match=message):
        split_train_data_by_dp(arguments(), columns(**changes), 2)


def validate(data, **overrides):
    validate_train_data(arguments(**overrides), data, dp_size=1)


def test_rollouts_of_a_custom_conversion_are_counted_by_their_ids():
    """Six rows, three rollouts: with the rows counted, two to a step would pass and three would not."""
    validate(columns(), global_batch_size=3)
    with pytest.raises(UserError, match="has 3 samples, which is not a multiple of global_batch_size 2"):
        validate(columns(), global_batch_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_ids": None, "rollout_counts": [1, 0, 1, 0, 1, 0]}, "other than 1 and no rollout_ids"),
        ({"rollout_ids": ["a", None, "b", "b", "c", "a"]}, "sample 1 has rollout_ids None; .*leave the column out"),
        (
            {"prompt_group_indices": [4, 4, 4, 1, 1, 4]},
            "rollout_id b spans several prompt groups, group_index 4 and 1; a rollout answers one prompt",
        ),
    ],
)
def test_columns_that_contradict_each_other(changes, message):
    with pytest.raises(UserError, match=message):
        validate(columns(**changes), global_batch_size=3)


@pytest.mark.parametrize(
    ("changes", "num_rollouts"),
    [({"prompt_group_indices": [4, 4, 4, 4, 1, 4]}, 3), ({"rollout_ids": None, "rollout_counts": [1] * 6}, 6)],
)
def test_columns_that_agree(changes, num_rollouts):
    """All rollouts fill one step, and no step of one more."""
    assert validate(columns(**changes), global_batch_size=num_rollouts) is None
    with pytest.raises(UserError, match=f"has {num_rollouts} samples, which is not a multiple"):
        validate(columns(**changes), global_batch_size=num_rollouts + 1)


# ---- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_that_spans_two_groups(mode):
    with pytest.raises(UserError, match="rollout_id 5 spans several prompt groups, group_index 2 and 7"):
        convert(arguments(mode, prompt_groups="ragged"), groups={5: 7})
    convert(arguments(mode, prompt_groups="ragged"))


def test_a_row_without_group_spans_none():
    assert convert(arguments(), groups={5: None})["rollout_counts"] == [1, 0, 1, 0, 1, 0]


def test_rollouts_without_groups_are_normalised_by_place():
    """Rollouts 5, 9 and 4, 3 are the groups, whatever their rows: rewards 2, 0 about a mean of 1; 1, 0 about 0.5."""
    rows = [Row.of([1], [0], rollout=rollout) for rollout in [5, 5, 9, 5, 4, 3, 3]]
    args = mode_namespace("sample_mean", n_samples_per_prompt=2, grpo_std_normalization=False)
    samples = samples_of(rows)
    for sample in samples:
        sample.group_index = None
    data = convert_samples_to_train_data(args, samples, {}, None, None)
    assert data["raw_reward"] == [2, 2, 0, 2, 1, 0, 0]
    assert data["rewards"] == [1.0, 1.0, -1.0, 1.0, 0.5, -0.5, -0.5]


# ---- reducers that want the step's context --------------------------------------------------------------------------

PROMPT_COLUMNS = {"prompt_group_indices", "prompt_counts", "prompt_mask_sums"}
NOT_PROMPT_MEAN = [mode for mode in MODES if mode != "prompt_mean"]


def reducer(wants_context):
    return f"{__name__}.factory_with{'' if wants_context else 'out'}_context"


@pytest.mark.parametrize("mode", NOT_PROMPT_MEAN)
def test_prompt_columns_are_there_for_a_reducer_that_wants_context(mode):
    args = arguments(mode, custom_pg_loss_reducer_function_path=reducer(True))
    data = convert(args)
    assert data["prompt_mask_sums"] == [7, 7, 7, 7, 2, 7] and data["prompt_counts"] == [1, 0, 0, 0, 1, 0]
    assert not PROMPT_COLUMNS & convert(args, groups={4: None}).keys(), "only where every sample has a group"
    args.custom_pg_loss_reducer_function_path = reducer(False)
    assert not PROMPT_COLUMNS & convert(args).keys()


@pytest.mark.parametrize("mode", NOT_PROMPT_MEAN)
def test_prompt_columns_are_left_out_again_where_a_group_lies_in_two_steps(mode):
    """One rollout a step: group 2's rollouts 5 and 9 are in two steps. Three rollouts a step: all are in one."""
    args = arguments(mode, custom_pg_loss_reducer_function_path=reducer(True))
    data = convert(args)
    before = copy.deepcopy(data)
    args.global_batch_size = 1
    (shard,) = split_train_data_by_dp(args, data, 1)
    assert not PROMPT_COLUMNS & shard.keys() and "prompt_indices" not in shard
    assert {key: data[key] for key in before} == before
    args.global_batch_size = 3
    (shard,) = split_train_data_by_dp(args, data, 1)
    assert by_row([shard], "prompt_indices") == [0, 0, 0, 0, 1, 0]
    # Ragged steps hold whole groups.
    args.global_batch_size, args.prompt_groups = 1, "ragged"
    (shard,) = split_train_data_by_dp(args, data, 1)
    assert shard["step_row_counts"] == [5, 1] and shard["prompt_mask_sums"] == [7, 7, 7, 7, 7, 2]


def test_the_split_alone_refuses_totals_and_groups_that_are_not_those_of_the_rows():
    args = arguments("prompt_mean", n_samples_per_prompt=2, global_batch_size=4)
    data = {"tokens": [[0, 1]] * 4, "response_lengths": [1] * 4, "loss_masks": [[1]] * 4, "rewards": [0.0] * 4}
    whole = {"prompt_group_indices": [0, 0, 1, 1], "prompt_mask_sums": [2] * 4}
    shards = split_train_data_by_dp_raw(args, data | whole, dp_size=2)
    assert [shard["prompt_mask_sums"] for shard in shards] == [[2, 2]] * 2
    with pytest.raises(UserError, match=r"inconsistent prompt_mask_sums in prompt group 0: 99, .* have 2 active"):
        split_train_data_by_dp_raw(args, data | whole | {"prompt_mask_sums": [99, 99, 2, 2]}, dp_size=2)
    with pytest.raises(UserError, match=r"complete prompt groups of n_samples_per_prompt=2 .* group_index 0 with 1"):
        groups = {"prompt_group_indices": [0, 1, 1, 1], "prompt_mask_sums": [1, 3, 3, 3]}
        split_train_data_by_dp_raw(args, data | groups, dp_size=2)
