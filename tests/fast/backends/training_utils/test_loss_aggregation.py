"""The pure file: modes, counts, denominators, and the one reducer."""

import ast
import sys
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils import loss_aggregation
from miles.backends.training_utils.loss_aggregation import (
    MODES,
    LossAggregation,
    StepCounts,
    concat,
    make_reducer,
    mask_sums,
    prompt_denominators,
)
from tests.fast import oracle
from tests.fast.oracle import Row

NAN, INF = float("nan"), float("inf")
ROWS = [  # two groups of two; short and high, long and low, a hole in the mask, a row without active tokens
    Row.of([1, 1], [8, 4], group=0),
    Row.of([1, 0, 1, 1, 1], [1, 99, -1, 0.5, 0.25], group=0),
    Row.of([1], [-3], group=1),
    Row.of([0, 0, 0], [7, 7, 7], group=1),
]


def tensors(rows, dtype=torch.int64):
    masks = [torch.tensor(row.mask, dtype=dtype) for row in rows]
    return masks, torch.tensor([float(x) for row in rows for x in row.values])


def test_the_file_stands_alone():
    """It imports torch and the standard library only, so that it can be copied into any trainer."""
    tree = ast.parse(Path(loss_aggregation.__file__).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {"." * node.level + (node.module or "") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names) == {"torch"}


def test_modes_are_the_four_of_the_oracle():
    assert list(MODES) == list(oracle.MODES)


@pytest.mark.parametrize(
    ("namespace", "mode"),
    [
        ({}, "sample_mean"),
        ({"calculate_per_token_loss": False}, "sample_mean"),
        ({"calculate_per_token_loss": True}, "token_mean"),
        *[({"loss_aggregation": mode}, mode) for mode in oracle.MODES],
    ],
)
def test_mode_of_a_namespace(namespace, mode):
    assert LossAggregation.of(Namespace(**namespace)) is MODES[mode]


@pytest.mark.parametrize("name", ["median", "Token_Mean", "", "token-mean"])
def test_unknown_mode(name):
    with pytest.raises(ValueError, match=r"Unknown --loss-aggregation mode.*sample_mean.*constant"):
        LossAggregation.of(Namespace(loss_aggregation=name))


@pytest.mark.parametrize("mode", oracle.MODES)
def test_normalizer_is_tokens_only_for_token_mean(mode):
    counts = StepCounts(num_samples=7, num_prompts=3, num_tokens=2**24 + 1)
    assert MODES[mode].normalizer(counts) == (2**24 + 1 if mode == "token_mean" else 7)


def test_token_mean_of_no_token_is_refused_and_other_modes_are_not():
    counts = StepCounts(num_samples=4, num_prompts=2, num_tokens=0)
    with pytest.raises(ValueError, match="at least one active token"):
        MODES["token_mean"].normalizer(counts)
    assert MODES["sample_mean"].normalizer(counts) == 4


def test_counts_are_frozen():
    with pytest.raises(AttributeError):
        StepCounts(1, 1, 1).num_tokens = 2


def definition(rows, mode, divisor=8.0):
    """`(1/Z) sum_i (1/d_i) sum_t m x` put together from the file's parts."""
    masks, values = tensors(rows)
    group_sums = [sum(sum(other.mask) for other in rows if other.group == row.group) for row in rows]
    counts = StepCounts(len(oracle.rollouts(rows)), len(oracle.groups(rows)), oracle.num_tokens(rows))
    denominators = {
        "sample_mean": mask_sums(masks).to(torch.float64),
        "prompt_mean": prompt_denominators(
            torch.tensor(group_sums), prompts_per_sample=counts.num_prompts / counts.num_samples
        ),
        "token_mean": 1.0,
        "constant": divisor,
    }[mode]
    reduced = make_reducer(masks, denominators=denominators)(values)
    return reduced.item() / MODES[mode].normalizer(counts)


@pytest.mark.parametrize("mode", oracle.MODES)
@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1], [ROWS[2], ROWS[0], ROWS[3], ROWS[1]]], ids=["", "back", "mixed"])
def test_parts_make_the_law(mode, rows):
    assert definition(rows, mode) == pytest.approx(float(oracle.value(rows, mode, 8)), rel=1e-6)


def test_worked_example_by_hand():
    """Rows of 2, 6, 1, 1 tokens, value 1 but for the six zeros: 4/10; 3/4; (2/8 + 2/2)/2; 4/(8*4)."""
    rows = [
        Row.of([1] * 2, [1] * 2, group=0),
        Row.of([1] * 6, [0] * 6, group=0),
        Row.of([1], [1], group=1),
        Row.of([1], [1], group=1),
    ]
    values = [definition(rows, mode) for mode in ("token_mean", "sample_mean", "prompt_mean", "constant")]
    assert values == pytest.approx([0.4, 0.75, 0.625, 0.125], rel=1e-6)


def test_prompt_mean_is_not_the_mean_of_sample_means():
    masks_only = [Row(row.mask, row.values, row.group) for row in ROWS]
    assert definition(masks_only, "prompt_mean") != pytest.approx(definition(masks_only, "sample_mean"), abs=0.1)


def test_prompt_denominators():
    """Complete groups of four: P/N = 1/4. A group without an active token counts as one token."""
    denominators = prompt_denominators(torch.tensor([8, 8, 0, 2**40]), prompts_per_sample=0.25)
    assert denominators.tolist() == [2.0, 2.0, 0.25, 2.0**38]


@pytest.mark.parametrize("ratio", [0.0, -0.5, NAN, INF])
def test_prompt_denominators_refuse(ratio):
    with pytest.raises(ValueError, match="positive and finite"):
        prompt_denominators(torch.tensor([1]), prompts_per_sample=ratio)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8, torch.float32])
def test_mask_sums_are_exact_integers(dtype):
    masks, _ = tensors(ROWS, dtype)
    assert mask_sums(masks).dtype == torch.int64
    assert mask_sums(masks).tolist() == [2, 4, 1, 0]
    assert mask_sums([torch.ones(300, dtype=dtype)]).tolist() == [300]
    assert mask_sums([]).shape == (0,)


def test_a_zero_denominator_acts_as_one_and_the_weight_is_the_gradient():
    masks, values = tensors(ROWS)
    values.requires_grad_()
    make_reducer(masks, denominators=torch.tensor([2.0, 8.0, 0.0, 0.0]))(values).backward()
    expected = [0.5, 0.5, 1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 1, 0, 0, 0]
    assert values.grad.tolist() == expected


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_masked_positions_are_never_looked_at(poison):
    masks, values = tensors(ROWS)
    active = concat(masks).bool()
    values[~active] = poison
    values.requires_grad_()
    result = make_reducer(masks, denominators=1.0)(values)
    result.backward()
    assert result.item() == float(sum(row.masked_sum(row.values) for row in ROWS))
    assert values.grad.tolist() == active.to(torch.float32).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_is_the_exact_sum_in_float32_or_wider(dtype):
    """2**16 tokens of 1/256 and one of 300: naive bfloat16 or float16 accumulation loses most of them."""
    values = torch.full((2**16 + 1,), 2.0**-8, dtype=dtype)
    values[0] = 300.0
    result = make_reducer([torch.ones(2**16 + 1)], denominators=3.0)(values)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.item() == pytest.approx(float(Fraction(300 + 256, 3)), rel=1e-7)


def test_no_rows():
    values = torch.zeros(0, requires_grad=True)
    result = make_reducer([], denominators=torch.zeros(0))(values)
    assert result.shape == () and result.item() == 0.0
    result.backward()
    assert concat([]).shape == (0,)


@pytest.mark.parametrize("count", [10, 12])
def test_values_of_another_length_are_refused(count):
    masks, _ = tensors(ROWS)
    with pytest.raises(ValueError, match=r"11 response tokens of 4 rows.*got"):
        make_reducer(masks, denominators=1.0)(torch.ones(count))


def test_denominators_of_another_length_are_refused():
    masks, _ = tensors(ROWS)
    with pytest.raises(ValueError, match="one denominator for each of 4 rows"):
        make_reducer(masks, denominators=torch.ones(3))
