"""A plug-in that breaks its contract is named in one clear error, and an empty micro-batch breaks none."""

from argparse import Namespace

import pytest
import torch

from miles.backends.training_utils.loss import _checked_loss
from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.loss_hub import custom_reducer
from miles.backends.training_utils.loss_hub.custom_correction import check_correction, check_correction_signature
from miles.backends.training_utils.loss_hub.custom_reducer import probe_pg_loss_reducer
from miles.backends.training_utils.loss_hub.losses import policy_loss_function
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.trainer import main
from miles.utils.errors import UserError
from miles.utils.options import Options
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.backends.training_utils.loss.inputs import CUT, Step
from tests.fast.backends.training_utils.loss.test_loss_snapshot import run
from tests.fast.oracle import MODES
from tests.fast.tiny_runs import TINY, read_metrics

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1])]
PG_LOSS = torch.arange(4.0)
BATCH = {"total_lengths": [5, 3], "response_lengths": [3, 1], "loss_masks": MASKS}
RESPONSES = Responses(Options.of(Namespace(qkv_format="thd")), BATCH)


CONTEXTS = []


def too_few(total_lengths):
    return torch.sum


def not_callable(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return 3


def not_a_scalar(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values


def not_a_tensor(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.sum().item()


def detached(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.sum().detach()


def not_linear(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.sum() / values.abs().max()


def mean_of_the_call(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.mean()


def with_a_constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.sum() + 1


def right(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.sum()


def without_context_but_required(total_lengths, response_lengths, loss_masks, calculate_per_token_loss, *, counts):
    return lambda values: values.sum()


def by_context(total_lengths, response_lengths, loss_masks, calculate_per_token_loss, *, context):
    CONTEXTS.append(context)
    weights = torch.repeat_interleave(1 / context.denominators["prompt_mean"], torch.tensor(context.local_lengths))
    return lambda values: (values * torch.cat(list(context.local_masks)) * weights).sum()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (too_few, r"must take \(total_lengths, response_lengths, loss_masks, calculate_per_token_loss\)"),
        (not_callable, "must return a callable of per-token values, got int"),
        (not_a_scalar, r"must return a scalar tensor, got \(4,\)"),
        (not_a_tensor, "must return a scalar tensor, got float"),
        (detached, "must keep the gradient"),
        (not_linear, r"must be linear, f\(2 x - 3 y\) = 2 f\(x\) - 3 f\(y\).*got "),
        (with_a_constant, "must be linear.*or add a constant"),
        (mean_of_the_call, r"must add up over rows.* come to 0.4375, one after the other to 0.75"),
        (without_context_but_required, r"must take \(.*calculate_per_token_loss\): missing .*counts"),
    ],
)
def test_reducers_are_probed_before_training(factory, message):
    args = Namespace(custom_pg_loss_reducer_function_path=f"{__name__}.{factory.__name__}")
    with pytest.raises(UserError, match=f"(?s){message}"):
        probe_pg_loss_reducer(args)


@pytest.mark.parametrize("cp", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_a_factory_that_declares_it_is_probed_in_both_layouts(qkv_format, cp):
    set_parallel_state(ParallelState(cp=GroupInfo(*cp)))
    CONTEXTS.clear()
    path = f"{__name__}.by_context"
    probe_pg_loss_reducer(Namespace(custom_pg_loss_reducer_function_path=path, qkv_format=qkv_format))
    assert CONTEXTS[0].qkv_format == qkv_format and len(CONTEXTS[0].local_lengths) == 2


def test_a_factory_that_declares_it_gets_its_context():
    """Two rows of one group with 2 and 1 active tokens: M_g = 3, times P / N = 1 / 2."""
    CONTEXTS.clear()
    path = f"{__name__}.by_context"
    args = Namespace(custom_pg_loss_reducer_function_path=path, qkv_format="thd", loss_aggregation="sample_mean")
    probe_pg_loss_reducer(args)
    context = CONTEXTS[0]
    assert context.step_counts == StepCounts(2, 1, 3) and context.normalizer == 2
    assert {mode: None if d is None else d.tolist() for mode, d in context.denominators.items()} == {
        "sample_mean": [2, 1],
        "prompt_mean": [1.5, 1.5],
        "token_mean": [1, 1],
        "constant": None,
    }
    assert context.local_lengths == [3, 1] and context.sample_totals.tolist() == [2, 1]
    with pytest.raises(ValueError, match="run prepare_loss_terms before it"):
        custom_reducer.ReducerContext.of(Responses(Options.of(args), BATCH), MASKS)


def test_a_right_reducer_and_none_pass_the_probe():
    probe_pg_loss_reducer(Namespace(custom_pg_loss_reducer_function_path=f"{__name__}.right"))
    probe_pg_loss_reducer(Namespace(custom_pg_loss_reducer_function_path=None))
    assert custom_reducer.check_signature(print, "builtins.print", 4, "anything") is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([PG_LOSS, MASKS, {}], "got list"),
        ((PG_LOSS, MASKS), "got a tuple of 2"),
        (
            (PG_LOSS, MASKS, {"loss": PG_LOSS}),
            r"that the loss does not use itself; got \['loss'\]",
        ),
        ((PG_LOSS[:2], MASKS, {}), r"with pg_loss of shape \(4,\).* got \(2,\)"),
        ((PG_LOSS, MASKS, {"kl": 0.5}), r"with kl of shape \(4,\).* got float"),
        ((PG_LOSS, MASKS[:1], {}), "one mask for each of 2 rows"),
        ((PG_LOSS, None, {}), "one mask for each of 2 rows"),
        ((PG_LOSS, [MASKS[0][:2], MASKS[1]], {}), r"of lengths \[3, 1\] or \[3, 1\]; got \[\(2,\), \(1,\)\]"),
        ((PG_LOSS, [2 * MASKS[0], MASKS[1]], {}), "hold 0"),
        ((PG_LOSS, [MASKS[0] * 0 + 1, MASKS[1]], {}), "kept one that loss_masks leaves out"),
    ],
)
def test_corrections(result, message):
    with pytest.raises(UserError, match=message):
        check_correction("my.correction", result, RESPONSES, PG_LOSS)


def test_a_correction_keeps_the_gradient():
    result = (PG_LOSS, MASKS, {})
    with pytest.raises(UserError, match="pg_loss keeping its gradient; it is detached"):
        check_correction("my.correction", result, RESPONSES, PG_LOSS.clone().requires_grad_())


def takes_something_else(*, pg_loss, advantages):
    return pg_loss, [], {}


def positional(pg_loss, /, loss_masks):
    return pg_loss, loss_masks, {}


def takes_some(*, pg_loss, local_masks, alpha=0.5):
    return pg_loss, local_masks, {}


@pytest.mark.parametrize(("function", "asked"), [(takes_something_else, "advantages"), (positional, "pg_loss")])
def test_a_correction_that_asks_for_what_there_is_not_is_refused(function, asked):
    path = f"{__name__}.{function.__name__}"
    with pytest.raises(UserError, match=f"of which it may take any; it asks for {asked}. Rename them"):
        check_correction_signature(Namespace(custom_tis_function_path=path))


@pytest.mark.parametrize("path", [None, f"{__name__}.takes_some", "builtins.print"])
def test_other_corrections_may_ask_as_they_like(path):
    check_correction_signature(Namespace(custom_tis_function_path=path))


def test_a_right_correction():
    result = (PG_LOSS, [MASKS[0] * 0, MASKS[1].bool()], {"kl": PG_LOSS})
    corrected, masks, metrics = check_correction("my.correction", result, RESPONSES, PG_LOSS)
    assert corrected is PG_LOSS and metrics == {"kl": PG_LOSS}
    assert [mask.tolist() for mask in masks] == [[0, 0, 0], [True]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.tensor(1.0), "got Tensor"),
        ((torch.ones(2), {"loss": torch.tensor(1.0)}), r"with loss a scalar tensor|got \(2,\)"),
        ((torch.tensor(1.0), {"loss": 1.0}), "with loss a scalar tensor; got float"),
    ],
)
def test_custom_losses(result, message):
    args = Namespace(loss_type="custom_loss", custom_loss_function_path="my.loss")
    with pytest.raises(UserError, match=message):
        _checked_loss(args, result)


@pytest.mark.parametrize("mode", MODES)
def test_a_custom_loss_may_wrap_the_policy_loss(mode):
    """Under token_mean it is given the token sum, and the wrapped loss still takes its sample means itself."""
    step = Step()
    plain = run(mode_namespace(mode), step, CUT)
    wrapped = mode_namespace(
        mode, loss_type="custom_loss", custom_loss_function_path=f"{__name__}.wrapped_policy_loss"
    )
    value, gradient, metrics = run(wrapped, step, CUT)
    assert value == plain[0] and metrics == plain[2]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradient, plain[1], strict=True))


def loss_that_counts_tokens(args, batch, logits, sum_of_sample_mean):
    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    return loss, {**metrics, "num_tokens": loss.detach()}


def test_a_custom_loss_that_takes_the_step_s_names_stops_every_rank(tmp_path, capfd):
    options = ["--loss-type", "custom_loss", "--custom-loss-function-path", f"{__name__}.loss_that_counts_tokens"]
    assert run_ranks(lambda: main([*TINY, *options, "--output-dir", str(tmp_path)]), 2) == [2, 2]
    assert read_metrics(tmp_path) == []
    told = "metric num_tokens, which every step logs itself; give it another name"
    assert capfd.readouterr().err.count(told) == 1


def wrapped_policy_loss(args, batch, logits, sum_of_sample_mean):
    return policy_loss_function(args, batch, logits, sum_of_sample_mean)
