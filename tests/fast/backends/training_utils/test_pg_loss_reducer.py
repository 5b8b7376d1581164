"""Which reducer the policy-gradient term gets: the mode's, or a custom one before every mode."""

from argparse import Namespace

import pytest
import torch

from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.loss_hub.losses import get_pg_loss_reducer
from miles.utils.errors import UserError
from tests.fast.backends.training_utils import harness
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace
from tests.fast.oracle import MODES, Row

HERE = __name__
VALUES = [  # short rows high, long rows low, a hole, a fully masked row; two groups of two
    Row.of([1, 1], [8, 6], group=0),
    Row.of([1, 1, 0, 1, 1, 1, 1], [0.5, -0.25, 64, 1, 0.25, 0.5, -1], group=0),
    Row.of([1], [-5], group=1, prompt_length=1),
    Row.of([0, 0, 0], [31, 7, 9], group=1),
]


def reducer_of(args, batch, rows, default=None):
    return get_pg_loss_reducer(
        args,
        batch,
        total_lengths=[row.total_length for row in rows],
        response_lengths=[row.response_length for row in rows],
        pg_loss_masks=[torch.tensor(row.mask) for row in rows],
        max_seq_lens=None,
        default_reducer=default,
    )


def values_of(rows):
    return torch.tensor([float(x) for row in rows for x in row.values])


# ---- get_pg_loss_reducer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        mode_namespace("sample_mean"),
        Namespace(qkv_format="thd", calculate_per_token_loss=False, custom_pg_loss_reducer_function_path=None),
        Namespace(qkv_format="thd"),
    ],
    ids=["chosen", "legacy", "bare"],
)
def test_sample_mean_is_the_default_reducer_itself(args):
    default = object()
    assert reducer_of(args, {}, VALUES, default) is default


def test_a_legacy_namespace_with_per_token_loss_sums_tokens():
    args = Namespace(qkv_format="thd", calculate_per_token_loss=True)
    total = sum(float(row.masked_sum(row.values)) for row in VALUES)
    assert reducer_of(args, {}, VALUES)(values_of(VALUES)).item() == total


def test_prompt_mean_uses_the_whole_groups_total_and_the_steps_ratio():
    """Only two of the rows are here; M_0 = 8, M_1 = 1 and P / N = 1 / 2: 14/8*2 - 5/1*2."""
    rows = [VALUES[0], VALUES[2]]
    batch = {"prompt_mask_sums": torch.tensor([8, 1]), "step_counts": StepCounts(4, 2, 9)}
    assert reducer_of(mode_namespace("prompt_mean"), batch, rows)(values_of(rows)).item() == 3.5 - 10
    ragged = {"prompt_mask_sums": torch.tensor([8, 1]), "step_counts": StepCounts(8, 2, 9)}
    assert reducer_of(mode_namespace("prompt_mean"), ragged, rows)(values_of(rows)).item() == 7.0 - 20
    # A micro-batch that does not know its step: complete groups of n_samples_per_prompt.
    alone = {"prompt_mask_sums": torch.tensor([8, 1])}
    args = mode_namespace("prompt_mean", n_samples_per_prompt=4)
    assert reducer_of(args, alone, rows)(values_of(rows)).item() == 7.0 - 20


@pytest.mark.parametrize("batch", [{}, {"prompt_mask_sums": None}])
def test_prompt_mean_without_group_totals_is_refused(batch):
    with pytest.raises(ValueError, match="prompt_mask_sums"):
        reducer_of(mode_namespace("prompt_mean"), batch, VALUES)


def test_a_fully_masked_group_counts_as_one_token():
    rows = [Row.of([0, 0], [3, 4], group=0)]
    batch = {"prompt_mask_sums": torch.tensor([0]), "step_counts": StepCounts(2, 1, 5)}
    x = values_of(rows).requires_grad_()
    result = reducer_of(mode_namespace("prompt_mean"), batch, rows)(x)
    result.backward()
    assert result.item() == 0.0 and x.grad.tolist() == [0.0, 0.0]


def test_constant_divides_by_the_divisor_alone():
    args = mode_namespace("constant", 2.5)
    assert reducer_of(args, {}, VALUES)(values_of(VALUES)).item() == pytest.approx((14 + 1 - 5) / 2.5)


def test_unknown_mode():
    with pytest.raises(ValueError, match="Unknown --loss-aggregation mode"):
        reducer_of(Namespace(loss_aggregation="mean", qkv_format="thd"), {}, VALUES)


# ---- custom reducers ----------------------------------------------------------------------------------------------

SEEN = []


def last_token_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Keep the factory's arguments; sum the last token of every row, times 100."""
    SEEN.append(
        (list(total_lengths), list(response_lengths), [m.tolist() for m in loss_masks], calculate_per_token_loss)
    )
    return lambda x: (
        100.0 * sum(row[-1] for row in x.split(list(response_lengths))) if len(response_lengths) else x.sum()
    )


def not_a_factory(*_):
    return 3.0


def vector_reducer(*_):
    return lambda x: x


def float_reducer(*_):
    return lambda x: 1.5


NOT_CALLABLE = 7


@pytest.mark.parametrize("mode", MODES)
def test_a_custom_reducer_comes_before_every_mode(mode):
    SEEN.clear()
    path = f"{HERE}.last_token_reducer"
    args = mode_namespace(mode, custom_pg_loss_reducer_function_path=path, **batch_sizes(VALUES))
    assert reducer_of(args, {}, VALUES, "unused")(values_of(VALUES)).item() == 100.0 * (6 - 1 - 5 + 9)
    assert SEEN[-1] == (
        [row.total_length for row in VALUES],
        [row.response_length for row in VALUES],
        [list(row.mask) for row in VALUES],
        mode == "token_mean",
    )
    # Through the loss: divided by the mode's own normalizer, and the sample-mean metrics are not touched by it.
    # Masked positions hold 0 by then: 100 * (6 - 1 - 5 + 0) = 0, so raise row 0's last value.
    rows = [Row.of([1, 1], [8, 7], group=0), *VALUES[1:]]
    outcome = harness.Engine(args, rows).run([[[0, 2], [1]], [[3]]])
    normalizer = 9 if mode == "token_mean" else 4
    assert outcome.metrics["pg_loss"] == pytest.approx(100.0 / normalizer, rel=1e-5)
    assert outcome.value == pytest.approx(100.0 / normalizer, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_factory", "callable"),
        ("vector_reducer", "scalar"),
        ("float_reducer", "scalar"),
        ("absent", "absent"),
        ("NOT_CALLABLE", "callable"),
    ],
)
def test_a_broken_custom_reducer_is_named(name, message):
    args = mode_namespace("prompt_mean", custom_pg_loss_reducer_function_path=f"{HERE}.{name}")
    with pytest.raises(UserError, match=f"(?s){name}.*{message}|{message}.*{name}"):
        reducer_of(args, {}, VALUES)(values_of(VALUES))


def test_a_custom_reducer_that_does_not_import_is_named():
    args = mode_namespace("sample_mean", custom_pg_loss_reducer_function_path="no.such.module.reducer")
    with pytest.raises(UserError, match=r"no\.such\.module"):
        reducer_of(args, {}, VALUES)
