"""The weight of tokens and samples in a step against exact fractions, under any cut."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.step_weights import (
    effective_number,
    row_weights,
    token_weights,
)
from miles.ray.rollout.steps import length_quarters
from tests.fast import oracle
from tests.fast.backends.training_utils.described import (
    EXACT,
    EXAMPLE,
    expected_description,
    expected_weights,
    walk,
)
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace
from tests.fast.backends.training_utils.meetings import World
from tests.fast.backends.training_utils.test_changed_masks import changed
from tests.fast.backends.training_utils.test_pipeline import SCHEDULES, in_two_steps
from tests.fast.backends.training_utils.test_split_properties import PROPERTY, steps

HERE = __name__


@st.composite
def two_steps(draw):
    """The rows of two steps, with rejected tokens and loss weights of each, and how many are the first's."""
    first = draw(changed(draw(steps(max_parts=draw(st.sampled_from([0, 3]))))))
    second = in_two_steps(first)[len(first) :]
    for place, row in enumerate(first):
        weights = None if row.loss_weights is None else tuple(2 * weight for weight in row.loss_weights)
        second[place] = replace(second[place], kept=row.kept[::-1], loss_weights=weights)
    return [*first, *second], len(first)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("mode", oracle.MODES)
@PROPERTY
@given(data=st.data())
def test_any_rows_and_split(mode, cp_size, data):
    rows, num_first = data.draw(two_steps())
    counting = oracle.Counting(
        data.draw(st.sampled_from(["drop", "keep"])), data.draw(st.sampled_from(["weights", "tokens"]))
    )
    parts = [rows[:num_first], rows[num_first:]]
    original = replace(counting, rejected_tokens="keep")
    assume(mode != "token_mean" or all(sum(map(original.total, part)) for part in parts))
    schedule = SCHEDULES[data.draw(st.sampled_from(list(SCHEDULES)))]
    divisor = 2.5 if mode == "constant" else None
    args = mode_namespace(mode, divisor, **batch_sizes(parts[0]), **schedule, use_tis=True, tis_clip_low=0.5)
    args.tis_type = "icepop"
    args.rejected_tokens, args.loss_weight_normalization = counting.rejected_tokens, counting.loss_weight_normalization
    dp_size = data.draw(st.integers(1, 3))
    if mode == "prompt_mean" and args.prompt_groups == "complete":
        assume(len(oracle.groups(parts[0])) % dp_size == 0)
    ranks = walk(args, rows, World(dp_size, cp_size))
    found = {place: weight for _, weights in ranks for place, weight in weights.items()}
    assert len(found) == sum(row.response_length for row in rows)
    wanted = [row for part in parts for row in expected_weights(args, part, counting)]
    for (row, t), weight in found.items():
        assert weight == pytest.approx(wanted[row][t], rel=EXACT, abs=EXACT)
    for described, _ in ranks:
        for step, part in zip(described, parts, strict=True):
            expected = expected_description(args, part, counting)
            assert {name: step[name] for name in expected} == pytest.approx(expected, rel=EXACT)
            assert step.keys() - expected.keys() == {"num_kept_tokens", "num_counted_tokens"}


# ---- the worked example, by hand ----------------------------------------------------------------------------------

BY_HAND = {
    # weights of the samples; (sum w)^2 / sum w^2; share of the second
    "sample_mean": ([1 / 4] * 4, 4.0, 1 / 4),
    # tokens 1 / (2 * 8) and 1 / (2 * 2): 1/8, 3/8, 1/4, 1/4; 1 / (1/64 + 9/64 + 8/64) = 64/18
    "prompt_mean": ([1 / 8, 3 / 8, 1 / 4, 1 / 4], 64 / 18, 3 / 8),
    # tokens 1 / 10: 1 / (4 + 36 + 1 + 1) * 100
    "token_mean": ([0.2, 0.6, 0.1, 0.1], 100 / 42, 0.6),
    # tokens 1 / (8 * 4): the shares of token_mean
    "constant": ([2 / 32, 6 / 32, 1 / 32, 1 / 32], 100 / 42, 0.6),
}


def example_batch():
    return {
        "total_lengths": [row.total_length for row in EXAMPLE],
        "response_lengths": [row.response_length for row in EXAMPLE],
        "loss_masks": [torch.tensor(row.mask) for row in EXAMPLE],
        "prompt_mask_sums": torch.tensor([8, 8, 2, 2]),
        "step_counts": StepCounts(num_samples=4, num_prompts=2, num_tokens=10),
    }


@pytest.mark.parametrize("mode", oracle.MODES)
def test_the_worked_example(mode):
    args, batch = mode_namespace(mode), example_batch()
    expected, effective, longest = BY_HAND[mode]
    rows = row_weights(args, batch, token_weights(args, batch))
    assert rows.tolist() == pytest.approx(expected, rel=EXACT)
    assert effective_number(rows) == pytest.approx(effective, rel=EXACT)
    assert sum(rows.tolist()[i] for i, q in enumerate(length_quarters([2, 6, 1, 3])) if q == 3) / sum(
        expected
    ) == pytest.approx(longest, rel=EXACT)


@pytest.mark.parametrize("weights, number", [([], 0.0), ([0.0, 0.0], 0.0), ([0.5, 0.5, 0.0], 2.0), ([3e-9], 1.0)])
def test_effective_number(weights, number):
    assert effective_number(torch.tensor(weights)) == pytest.approx(number)


@pytest.mark.parametrize("unit", [1e-310, 1e-200, 1e200, 4e307])
def test_effective_number_where_squares_leave_the_range_of_float64(unit):
    weights = torch.tensor([unit, unit, 2 * unit, 0.0], dtype=torch.float64)
    assert effective_number(weights) == pytest.approx(16 / 6)  # 4^2 / (1 + 1 + 4)


def test_masks_that_are_given_are_those_that_are_summed():
    """Without a prepared step the divisors are those of the given masks where rejected tokens are dropped."""
    args, batch = mode_namespace("sample_mean"), example_batch()
    args.rejected_tokens = "drop"
    kept = [torch.tensor([1, 0]), torch.zeros(6, dtype=torch.int64), torch.tensor([1]), torch.tensor([0, 0, 1])]
    assert token_weights(args, batch, kept).tolist() == [0.25, 0, 0, 0, 0, 0, 0, 0, 0.25, 0, 0, 0.25]


@pytest.mark.parametrize("loss_type", ["sft_loss", "value_loss", "custom_loss"])
@pytest.mark.parametrize(
    ("mode", "expected"), [("token_mean", [0.2, 0.6, 0.1, 0.1]), ("constant", [0.25] * 4), ("prompt_mean", [0.25] * 4)]
)
def test_other_losses_are_token_means_or_sample_means(mode, expected, loss_type):
    args, batch = mode_namespace(mode, loss_type=loss_type), example_batch()
    assert row_weights(args, batch, token_weights(args, batch)).tolist() == pytest.approx(expected, rel=EXACT)


# ---- reducers of one's own ----------------------------------------------------------------------------------------


def double_first_token(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Takes the values' float32 for granted, as a plug-in may."""
    weights = torch.cat([mask * (1.0 + (torch.arange(len(mask)) == 0)) for mask in loss_masks])
    return lambda values: values @ weights


def by_share(total_lengths, response_lengths, loss_masks, calculate_per_token_loss, *, context):
    """Weigh a row by its sample's share of the step's counted tokens."""
    share = context.denominators["sample_mean"] / context.sample_totals.sum()
    factors = torch.cat([mask * x for mask, x in zip(context.local_masks, share.float(), strict=True)])
    return lambda values: (torch.where(factors != 0, values, 0.0) * factors).sum()


@pytest.mark.parametrize(
    ("mode", "reducer", "expected"),
    [
        # 3, 7, 2 and 1 tokens, the first of a row twice; the fourth row's first is masked. Divided by N or M.
        ("sample_mean", double_first_token, [3 / 4, 7 / 4, 2 / 4, 1 / 4]),
        ("token_mean", double_first_token, [3 / 10, 7 / 10, 2 / 10, 1 / 10]),
        # m_i m_i / M, divided by N.
        ("prompt_mean", by_share, [4 / 40, 36 / 40, 1 / 40, 1 / 40]),
    ],
)
def test_a_reducer_of_ones_own(mode, reducer, expected):
    path = f"{HERE}.{reducer.__name__}"
    args = mode_namespace(mode, **batch_sizes(EXAMPLE), custom_pg_loss_reducer_function_path=path)
    ((described,), weights), *others = walk(args, EXAMPLE, World(2, 1))
    assert all(other[0] == [described] for other in others)
    for _, of_rank in others:
        weights |= of_rank
    rows = [sum(weights[i, t] for t in range(row.response_length)) for i, row in enumerate(EXAMPLE)]
    assert rows == pytest.approx(expected, rel=1e-6)  # float32, as in training
    assert described["longest_quarter_weight"] == pytest.approx(expected[1] / sum(expected), rel=1e-6)
    assert described["effective_samples"] == pytest.approx(sum(expected) ** 2 / sum(w * w for w in expected), rel=1e-6)
