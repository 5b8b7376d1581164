"""Custom reducers of the policy loss (`--custom-pg-loss-reducer-function-path`): what they get and must return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation, Reducer, RowTotals, StepCounts
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.loss_term import LossTerm
from miles.utils.errors import UserError
from miles.utils.misc import declares_context, load_function, wants_context
from miles.utils.options import Options
from miles.utils.types import RolloutBatch


@dataclass(frozen=True)
class ReducerContext:
    """Handed as the keyword `context` to a reducer factory that declares it.

    A reducer returns this micro-batch's and this rank's share of a sum over the step; the trainer divides the sum by
    `normalizer`. A factor that depends on rows alone, on the fields below among them, keeps it exact under every
    split.

    Attributes:
        args: The run's options.
        step_counts: N samples, P prompt groups and what is counted of all tokens, over the whole step.
        normalizer: Z of the run's mode: the counted tokens under `token_mean`, else N.
        denominators: d_i of every mode by its name, `[B]` float64; None for `prompt_mean` where the rows' groups are
            not known, and for `constant` without `--loss-aggregation-divisor`.
        sample_totals: `[N]` counted tokens of each sample of the whole step, in no particular order; 0 where nothing
            is left of it. int64, float64 where loss weights count.
        local_lengths: B numbers T_i of response tokens on this context-parallel rank; the values that the reducer gets
            have their sum as length.
        local_masks: B masks `[T_i]` of the tokens that the policy term sums over.
        max_seq_lens: B padded lengths, for "bshd".
        qkv_format: "thd" or "bshd".
    """

    args: Options
    step_counts: StepCounts
    normalizer: int | float
    denominators: Mapping[str, torch.Tensor | None]
    sample_totals: torch.Tensor
    local_lengths: Sequence[int]
    local_masks: Sequence[torch.Tensor]
    max_seq_lens: Sequence[int] | None
    qkv_format: str

    @classmethod
    def of(cls, responses: Responses, masks: Sequence[torch.Tensor]) -> ReducerContext:
        """Read the context from a micro-batch that `prepare_loss_terms` has prepared, and the masks that are summed.

        Raises:
            ValueError: the batch does not know its step.
        """
        args, batch = responses.args, responses.batch
        if batch.get("sample_totals") is None:
            raise ValueError("a reducer's context needs totals of the whole step; run prepare_loss_terms before it")
        term = LossTerm.of(responses)
        totals = term.divisor_totals(like=[term.row_totals])
        local_masks = responses.slice(masks)
        return cls(
            args=args,
            step_counts=totals.counts,
            normalizer=LossAggregation.of(args).normalizer(totals.counts),
            denominators={name: _denominators(mode, totals) for name, mode in MODES.items()},
            sample_totals=batch["sample_totals"],
            local_lengths=[mask.numel() for mask in local_masks],
            local_masks=local_masks,
            max_seq_lens=batch.get("max_seq_lens"),
            qkv_format=args.qkv_format,
        )


def _denominators(mode: LossAggregation, totals: RowTotals) -> torch.Tensor | None:
    """Return d_i `[B]` of a mode, None where the step does not have what the mode needs."""
    if mode.needs_prompt_groups and (totals.prompts is None or not totals.counts.num_prompts):
        return None
    if mode.needs_divisor and totals.divisor is None:
        return None
    divisors = torch.as_tensor(mode.denominators(totals), dtype=torch.float64, device=totals.samples.device)
    return divisors.expand(totals.samples.shape)


def load_pg_loss_reducer(
    args: Options,
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
    options = Options.of(args)
    path = str(options.custom_pg_loss_reducer_function_path)
    factory = load_function(path)
    keywords = {"context": context} if declares_context(factory) else {}
    names = "total_lengths, response_lengths, loss_masks, calculate_per_token_loss"
    check_signature(factory, path, 4, names + ", *, context" * bool(keywords), **keywords)
    reducer = factory(total_lengths, response_lengths, loss_masks, options.calculate_per_token_loss, **keywords)
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


def probe_pg_loss_reducer(args: Options) -> None:
    """Try a custom reducer on two rows before anything is computed; without one, do nothing.

    Raises:
        UserError: what `load_pg_loss_reducer` refuses, or a reducer that is not linear or does not add up over rows:
            without that its results over micro-batches and ranks do not add up to the step's.
    """
    options = Options.of(args)
    path = options.custom_pg_loss_reducer_function_path
    if path is None:
        return
    values = torch.tensor([0.5, -1.0, 2.0, 0.25]), torch.tensor([3.0, 0.125, -0.5, -4.0])
    (one, other), reducer = _probe(options, [0, 1], values)
    together = reducer((2 * one - 3 * other).requires_grad_())
    apart = 2 * reducer(one) - 3 * reducer(other)
    if not torch.allclose(together, apart, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"the reducer of {path} must be linear, f(2 x - 3 y) = 2 f(x) - 3 f(y), so that micro-batches and ranks "
            f"add up; got {together.item():g} and {apart.item():g}. Do not divide by what the values hold, or add a "
            "constant"
        )
    whole = reducer(one)
    by_row = torch.stack([reduce(row) for (row,), reduce in (_probe(options, [i], values[:1]) for i in (0, 1))]).sum()
    if not torch.allclose(whole, by_row, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"the reducer of {path} must add up over rows, so that micro-batches and ranks do not matter; two rows "
            f"together come to {whole.item():g}, one after the other to {by_row.item():g}. Do not average over the "
            "rows of the call; a factory that declares the keyword `context` gets what the whole step counts"
        )


PROBE_LENGTHS = (3, 1)
"""Response tokens of the two rows that reducers are tried on, each after a prompt of two."""


def _probe(args: Options, rows: Sequence[int], values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Reducer]:
    """Return the values of some rows of a made-up step, and the custom reducer for them."""
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    totals = torch.tensor([2, 1])
    lengths: Sequence[int] = [PROBE_LENGTHS[row] for row in rows]
    batch: RolloutBatch = {
        "total_lengths": [length + 2 for length in lengths],
        "response_lengths": lengths,
        "max_seq_lens": [max(PROBE_LENGTHS) + 2] * len(rows),  # read under "bshd" alone
        "loss_masks": [masks[row] for row in rows],
        **dict.fromkeys(("row_totals", "rollout_totals", "rollout_token_totals"), totals[list(rows)]),
        "prompt_totals": torch.tensor([3, 3])[list(rows)],
        "sample_totals": totals,
        "term_counts": StepCounts(num_samples=2, num_prompts=1, num_tokens=3),
    }
    context = None
    if wants_context(args):
        context = ReducerContext.of(Responses(args, batch), batch["loss_masks"])
        lengths = context.local_lengths  # with a context, the values are those of this context-parallel rank
    reducer = load_pg_loss_reducer(
        args, batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], context=context
    )
    by_row = [column.split(list(PROBE_LENGTHS)) for column in values]
    return [
        torch.cat([parts[row][:length] for row, length in zip(rows, lengths, strict=True)]) for parts in by_row
    ], reducer
