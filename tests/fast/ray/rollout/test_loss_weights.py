"""`Sample.loss_weights`: from samples and custom conversions to the shards, and every way they can be wrong."""

import math

import numpy as np
import pytest
import torch

from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    split_train_data_by_dp,
    validate_train_data,
)
from miles.utils.errors import UserError
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, samples_of
from tests.fast.oracle import MODES, Row

ROWS = [Row.of([1, 1, 0], [0] * 3, group=0), Row.of([0, 1], [0] * 2, group=0), Row.of([1], [0], group=1)]
ROWS.append(Row.of([1, 0, 0, 1], [0] * 4, group=1))
NAN, INF = math.nan, math.inf


def arguments(mode="sample_mean", **overrides):
    args = mode_namespace(mode, **{**batch_sizes(ROWS), **overrides})
    args.loss_weight_normalization = "weights"
    return args


def convert(weights, mode="sample_mean", **fields):
    """Convert the rows, the second with the weights and with other fields."""
    samples = samples_of(ROWS)
    samples[1].loss_weights = weights
    for name, value in fields.items():
        setattr(samples[1], name, value)
    return convert_samples_to_train_data(arguments(mode), samples, {}, None, None)


@pytest.mark.parametrize("mode", MODES)
def test_samples_without_weights_get_ones_beside_those_that_have_them(mode):
    assert "loss_weights" not in convert(None, mode)
    data = convert([0.25, 3], mode)
    assert data["loss_weights"] == [[1.0] * 3, [0.25, 3.0], [1.0], [1.0] * 4]
    assert all(type(weight) is float for row in data["loss_weights"] for weight in row)
    assert {key: data[key] for key in data if key != "loss_weights"} == convert(None, mode), "nothing else changes"


def test_a_removed_sample_keeps_its_weights_and_is_masked():
    data = convert([0.5, 2.0], remove_sample=True)
    assert data["loss_weights"][1] == [0.5, 2.0] and data["loss_masks"][1] == [0, 0]


def test_an_empty_response_has_no_weights():
    assert convert([], response_length=0, loss_mask=[])["loss_weights"][1] == []


@pytest.mark.parametrize(
    "weights",
    [[1, 0], (0.5, 2.0), np.array([0.5, 1e20]), torch.tensor([0.5, 0.0], dtype=torch.bfloat16), [0.0, 0.0]],
    ids=repr,
)
def test_weights_of_any_numbers(weights):
    assert convert(weights)["loss_weights"][1] == [float(weight) for weight in weights]


@pytest.mark.parametrize("position", [0, 1], ids=["masked", "active"])
@pytest.mark.parametrize("value", [-0.25, -1e-300, NAN, INF, -INF, 1e39, 10**39])
def test_a_value_that_is_no_weight_names_sample_and_place(value, position):
    weights = [1.0, 1.0]
    weights[position] = float(value)
    wanted = rf"^sample 1 \(index=1, .* loss_weights\[{position}\] = .*a number from 1e-20 to 1e\+20"
    with pytest.raises(UserError, match=wanted):
        convert(weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 loss_weights for a response_length of 2; .*masked ones included"),
        ([1.0] * 3, "3 loss_weights for a response_length of 2"),
        ([], "0 loss_weights for a response_length of 2"),
        (1.0, r"loss_weights 1.0 \(float\); it must be a flat list of numbers"),
        ("12", r"loss_weights '12' \(str\)"),
        ([[1.0], [1.0]], "must be a flat list of numbers"),
        ([1.0, None], r"loss_weights\[1\] = None; it must be a list of numbers"),
        ([1.0, "1"], r"loss_weights\[1\] = '1'"),
        ([True, False], r"loss_weights\[0\] = True"),
        ([1.0, 1j], r"loss_weights\[1\] = 1j"),
        ([1.0, 10**400], r"loss_weights\[1\] = 10"),
    ],
)
def test_weights_of_a_wrong_kind_or_number(weights, message):
    with pytest.raises(UserError, match=rf"^sample 1 \(index=1, .*{message}"):
        convert(weights)


# ---- custom conversions ---------------------------------------------------------------------------------------------


def columns(**changes):
    base = {
        "tokens": [[1, 2, 3], [4, 5]],
        "response_lengths": [2, 1],
        "loss_masks": [[1, 0], [1]],
        "rewards": [0.5, 1],
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1.0, 2.0]], "loss_weights for each of 2 rows, got 1"),
        (None, "loss_weights as a list .* got NoneType"),
        ([[1.0, 2.0], None], "sample 1 has loss_weights None"),
        ([[1.0, 2.0], [1.0, 2.0]], "sample 1 has 2 loss_weights for a response_length of 1"),
        ([[1.0, NAN], [1.0]], r"sample 0 has loss_weights\[1\] = nan"),
        ([[1.0, 2.0], [-1.0]], r"sample 1 has loss_weights\[0\] = -1.0"),
        ([[1.0, 2.0], torch.tensor([3e38, 1.0])[:1] * 2], r"sample 1 has loss_weights\[0\] = inf"),
    ],
)
def test_columns_of_a_custom_conversion_are_held_to_the_same(weights, message):
    args = arguments(global_batch_size=2)
    with pytest.raises(UserError, match=message):
        validate_train_data(args, columns(loss_weights=weights), dp_size=1)
    validate_train_data(args, columns(loss_weights=[[1.0, 0.0], torch.tensor([2.5])]), dp_size=1)


# ---- the split ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_weights_travel_with_their_rows(mode):
    data = convert([0.25, 3.0], mode)
    for shard in split_train_data_by_dp(arguments(mode), data, 2):
        assert shard["loss_weights"] == [data["loss_weights"][row] for row in shard["partition"]]


def weighted(second_step):
    """Two steps of two rows; the weights of the second step's active tokens: one of row 2, two of row 3."""
    data = convert(None, "token_mean")
    first, others = second_step
    data["loss_weights"] = [[1.0] * 3, [1.0] * 2, [first], [others, 1.0, 1.0, others]]
    return data


def split_in_two(data, normalization="weights"):
    args = arguments("token_mean", global_batch_size=2)
    args.loss_weight_normalization = normalization
    return split_train_data_by_dp(args, data, 1)


@pytest.mark.parametrize("zero", [0.0, 1e-60])
def test_a_token_mean_step_whose_counted_weight_is_zero(zero):
    """1e-60 is 0 in float32. The tokens of weight 1 are masked, so that nothing of the step is counted."""
    with pytest.raises(UserError, match=r"at least one active token of positive loss weight .*step 1 \(2 samples\)"):
        split_in_two(weighted((zero, zero)))
    split_in_two(weighted((zero, 1e-30)))
    split_in_two(weighted((zero, zero)), "tokens")
    for mode in ("sample_mean", "constant"):
        split_train_data_by_dp(arguments(mode, global_batch_size=2), weighted((zero, zero)), 1)


def test_a_host_without_the_option_counts_weights():
    args = arguments("token_mean", global_batch_size=2)
    del args.loss_weight_normalization
    with pytest.raises(UserError, match="positive loss weight"):
        split_train_data_by_dp(args, weighted((0.0, 0.0)), 1)
