"""Which reducer the policy-gradient term gets: a plug-in's, or the aggregation mode's."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation, Reducer, StepCounts
from miles.backends.training_utils.loss_hub.reducer_context import ReducerContext
from miles.backends.training_utils.loss_term import LossTerm
from miles.utils.errors import UserError
from miles.utils.misc import declares_context, load_function, wants_context
from miles.utils.types import RolloutBatch


def get_pg_loss_reducer(
    args: Namespace,
    batch: RolloutBatch,
    *,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    pg_loss_masks: Sequence[torch.Tensor],
    max_seq_lens: Sequence[int] | None,
    default_reducer: Reducer,
) -> Reducer:
    """Choose the reducer of the policy-gradient term.

    A custom reducer (`args.custom_pg_loss_reducer_function_path`) comes before every mode. Then `sample_mean` is
    `default_reducer` itself, and the other modes build theirs over `pg_loss_masks` with their own divisors.

    Args:
        args: Reads the mode, `loss_aggregation_divisor`, `qkv_format` and, for a micro-batch that does not know its
            step, `n_samples_per_prompt`.
        batch: Micro-batch; `prompt_mean` reads "prompt_mask_sums" (`[B]` M_g), or "prompt_totals" where what is
            counted differs from the original masks, and "step_counts".
        total_lengths: B lengths of prompt and response.
        response_lengths: B lengths of the response.
        pg_loss_masks: B whole-response masks of the tokens that the term sums over.
        max_seq_lens: B padded lengths, for "bshd".
        default_reducer: The sample-mean reducer.

    Returns:
        A reducer of `[T]` to a scalar, to be divided by the step's normalizer.

    Raises:
        ValueError: `prompt_mean` without `batch["prompt_mask_sums"]`, `constant` without a divisor, an unknown
            mode.
    """
    if getattr(args, "custom_pg_loss_reducer_function_path", None) is not None:
        context = ReducerContext.of(args, batch, pg_loss_masks) if wants_context(args) else None
        return load_pg_loss_reducer(args, total_lengths, response_lengths, pg_loss_masks, context=context)
    mode = LossAggregation.of(args)
    if mode is MODES["sample_mean"]:
        return default_reducer
    if mode.needs_step_samples and batch.get("sample_totals") is None:
        raise ValueError(f"{mode.name} needs totals of the whole step; run prepare_loss_terms before it")
    term = LossTerm.of(args, batch, pg_loss_masks)
    denominators = mode.denominators(term.divisor_totals(args, batch, like=pg_loss_masks))
    is_one_for_all = not isinstance(denominators, torch.Tensor)
    return get_sum_of_sample_mean(
        total_lengths,
        response_lengths,
        pg_loss_masks,
        qkv_format=args.qkv_format,
        max_seq_lens=max_seq_lens,
        **{"constant_divisor" if is_one_for_all else "sample_denoms": denominators},
    )


def load_pg_loss_reducer(
    args: Namespace,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    *,
    context: ReducerContext | None = None,
) -> Reducer:
    """Build the reducer of a custom factory and hold it to its contract.

    Args:
        args: Reads `custom_pg_loss_reducer_function_path` and `calculate_per_token_loss`.
        total_lengths: Passed on, first positional argument of the factory.
        response_lengths: Passed on, second.
        loss_masks: Passed on, third; `args.calculate_per_token_loss` is the fourth.
        context: Passed on as the keyword `context`, to a factory that declares it.

    Returns:
        The factory's reducer, which raises UserError where the result is not a scalar tensor or has lost the gradient.

    Raises:
        UserError: the path does not import, takes other arguments, or returned something that cannot be called.
    """
    path = args.custom_pg_loss_reducer_function_path
    per_token = getattr(args, "calculate_per_token_loss", False)
    factory = load_function(path)
    keywords = {"context": context} if declares_context(factory) else {}
    names = "total_lengths, response_lengths, loss_masks, calculate_per_token_loss"
    check_signature(factory, path, 4, names + ", *, context" * bool(keywords), **keywords)
    reducer = factory(total_lengths, response_lengths, loss_masks, per_token, **keywords)
    if not callable(reducer):
        raise UserError(f"{path} must return a callable of per-token values, got {type(reducer).__name__}")

    def reduce(values: torch.Tensor) -> torch.Tensor:
        result = reducer(values)
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise UserError(f"the reducer of {path} must return a scalar tensor, got {shape}")
        if values.requires_grad and not result.requires_grad:
            raise UserError(f"the reducer of {path} must keep the gradient; its result is detached from the values")
        return result.reshape(())

    return reduce


def check_signature(function: Callable[..., Any], path: str, num_arguments: int, names: str, **keywords: Any) -> None:
    """Check that a plug-in can be called with so many positional arguments, and these keywords.

    Raises:
        UserError: it cannot.
    """
    try:
        inspect.signature(function).bind(*[None] * num_arguments, **keywords)
    except TypeError as error:
        raise UserError(f"{path} must take ({names}): {error}") from None
    except ValueError:  # a built-in that does not tell its signature
        return


def probe_pg_loss_reducer(args: Namespace) -> None:
    """Try a custom reducer on two rows before anything is computed; without one, do nothing.

    Raises:
        UserError: what `load_pg_loss_reducer` refuses, or a reducer that is not linear or does not add up over rows:
            without that its results over micro-batches and ranks do not add up to the step's.
    """
    path = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is None:
        return
    values = torch.tensor([0.5, -1.0, 2.0, 0.25]), torch.tensor([3.0, 0.125, -0.5, -4.0])
    (one, other), reducer = _probe(args, [0, 1], values)
    together = reducer((2 * one - 3 * other).requires_grad_())
    apart = 2 * reducer(one) - 3 * reducer(other)
    if not torch.allclose(together, apart, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"the reducer of {path} must be linear, f(2 x - 3 y) = 2 f(x) - 3 f(y), so that micro-batches and ranks "
            f"add up; got {together.item():g} and {apart.item():g}. Do not divide by what the values hold, or add a "
            "constant"
        )
    whole = reducer(one)
    by_row = sum(reduce(row) for (row,), reduce in (_probe(args, [i], values[:1]) for i in (0, 1)))
    if not torch.allclose(whole, by_row, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"the reducer of {path} must add up over rows, so that micro-batches and ranks do not matter; two rows "
            f"together come to {whole.item():g}, one after the other to {by_row.item():g}. Do not average over the "
            "rows of the call; a factory that declares the keyword `context` gets what the whole step counts"
        )


PROBE_LENGTHS = (3, 1)
"""Response tokens of the two rows that reducers are tried on, each after a prompt of two."""


def _probe(args: Namespace, rows: Sequence[int], values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Reducer]:
    """Return the values of some rows of a made-up step, and the custom reducer for them."""
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    totals = torch.tensor([2, 1])
    batch: RolloutBatch = {
        "total_lengths": [PROBE_LENGTHS[row] + 2 for row in rows],
        "response_lengths": [PROBE_LENGTHS[row] for row in rows],
        "max_seq_lens": [max(PROBE_LENGTHS) + 2] * len(rows),  # read under "bshd" alone
        "loss_masks": [masks[row] for row in rows],
        **dict.fromkeys(("row_totals", "rollout_totals", "rollout_token_totals"), totals[list(rows)]),
        "prompt_totals": torch.tensor([3, 3])[list(rows)],
        "sample_totals": totals,
        "term_counts": StepCounts(num_samples=2, num_prompts=1, num_tokens=3),
    }
    context, lengths = None, batch["response_lengths"]
    if wants_context(args):
        context = ReducerContext.of(args, batch, batch["loss_masks"])
        lengths = context.local_lengths
    reducer = load_pg_loss_reducer(
        args, batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], context=context
    )
    # With a context, the values are those of this context-parallel rank.
    by_row = [column.split(list(PROBE_LENGTHS)) for column in values]
    return [
        torch.cat([parts[row][:length] for row, length in zip(rows, lengths, strict=True)]) for parts in by_row
    ], reducer
