"""How per-token losses of one optimizer step become one scalar, exactly, however the step is cut.

Every mode is the same expression and only chooses two kinds of numbers, a divisor for each sample and one for the
step:

    value = (1 / Z) * sum_i (1 / d_i) * sum_t m_it * x_it

| mode        | per-sample divisor d_i | step normalizer Z | source                                              |
|-------------|------------------------|-------------------|-----------------------------------------------------|
| sample_mean | max(m_i, 1)            | N                 | GRPO, arXiv 2402.03300                              |
| prompt_mean | max(M_g, 1) * P / N    | N                 | DAPO's equation, arXiv 2503.14476; ScaleRL, 2510.13786 |
| token_mean  | 1                      | M                 | DAPO's code; Megatron-Core's per-token loss         |
| constant    | L                      | N                 | Dr.GRPO, arXiv 2503.20783                           |

The sum over i is a sum over rows, so any cut into micro-batches and ranks adds up to it, provided that d_i and Z come
from the whole step. Hence reducers here return the local sum with d_i inside, and Z is applied once, by the caller.

Shapes: N samples, P prompt groups and M active tokens in the step; B rows in this micro-batch; row i has T_i response
tokens on this rank, T = sum_i T_i; m_it in {0, 1} is the loss mask, m_i = sum_t m_it over the whole response, M_g the
sum of m_i over the prompt group g of sample i, L the constant divisor.

This file needs torch and the standard library only, and knows nothing of ranks: copy it into any trainer.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

Reducer = Callable[[torch.Tensor], torch.Tensor]
"""Maps per-token values `[T]` to a scalar: this micro-batch's and this rank's share of a sum over the step. Those of
this file also map `[K, T]` to `[K]`, and are marked by `taking_stacks`."""

DEVICES_WITHOUT_WAIT = ("cpu",)
"""Devices whose results the program has at once, so that looking at one costs nothing."""


class LossAggregation(str, Enum):
    """The modes of `--loss-aggregation`."""

    SAMPLE_MEAN = "sample_mean"
    PROMPT_MEAN = "prompt_mean"
    TOKEN_MEAN = "token_mean"
    CONSTANT = "constant"

    @classmethod
    def of(cls, args: Any) -> LossAggregation:
        """Return the mode that a namespace asks for.

        A namespace without `loss_aggregation` is a legacy one, where `calculate_per_token_loss` chooses between
        `token_mean` and `sample_mean`.

        Raises:
            ValueError: the namespace names a mode that does not exist.
        """
        name = getattr(args, "loss_aggregation", None)
        if name is None:
            return cls.TOKEN_MEAN if getattr(args, "calculate_per_token_loss", False) else cls.SAMPLE_MEAN
        try:
            return cls(name)
        except ValueError:
            modes = ", ".join(mode.value for mode in cls)
            raise ValueError(f"Unknown --loss-aggregation mode {name!r}; choose one of {modes}") from None


@dataclass(frozen=True)
class StepCounts:
    """Totals of one optimizer step over all of its micro-batches and data-parallel ranks, as exact integers.

    Attributes:
        num_samples: N. Rollouts, which are the rows unless one rollout is stored as several; fully masked ones count.
        num_prompts: P. Prompt groups; a group whose every token is masked counts. 0 where the step has no groups.
        num_tokens: M. Active response tokens; a fully masked sample adds none. A float where tokens count by a weight.
    """

    num_samples: int
    num_prompts: int
    num_tokens: int | float

    def normalizer(self, mode: LossAggregation) -> int | float:
        """Return Z of the mode.

        Raises:
            ValueError: `token_mean` of a step without an active token, which has no mean.
        """
        if mode is not LossAggregation.TOKEN_MEAN:
            return self.num_samples
        if not self.num_tokens > 0:
            raise ValueError(
                f"token_mean needs at least one active token in the optimizer step, got {self.num_tokens}"
            )
        return self.num_tokens


class MetricDict(dict[str, torch.Tensor]):
    """Scalar metrics of a micro-batch, each a local sum, with the step total that it has to be divided by.

    `token_normalized` names the keys that are sums over active tokens (divide by M); `term_normalized` those over the
    tokens that the main term counts, which are others where a correction or loss weights changed them. All other
    keys are sums over samples (divide by N).
    """

    def __init__(
        self,
        per_sample: dict[str, torch.Tensor],
        per_token: dict[str, torch.Tensor],
        per_term: dict[str, torch.Tensor] | None = None,
        *,
        order: Sequence[str] = (),
    ) -> None:
        per_term = per_term or {}
        merged = {**per_sample, **per_token, **per_term}
        first = [key for key in order if key in merged]
        super().__init__({key: merged[key] for key in [*first, *(key for key in merged if key not in first)]})
        self.token_normalized = frozenset(per_token)
        self.term_normalized = frozenset(per_term)


def concat(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate 1-D rows; no rows give an empty tensor, which is what a rank without rows has."""
    rows = list(rows)
    return torch.cat(rows) if rows else torch.empty(0)


def row_lengths(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return T_i, the number of elements of each of B rows, as `[B]` int64 on the rows' device."""
    device = rows[0].device if rows else torch.device("cpu")
    return send([row.numel() for row in rows], device, dtype=torch.int64)


def send(values: Any, device: torch.device, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a list's or a CPU array's values as a tensor on a device, without waiting for what that is doing."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def mask_sums(loss_masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return m_i, the number of active tokens of each row.

    Args:
        loss_masks: B masks, row i `[T_i]`, any dtype, values 0 and 1.

    Returns:
        `[B]` int64, exact at any length, on the masks' device.
    """
    return packed_mask_sums(concat(loss_masks), row_lengths(loss_masks))


def packed_mask_sums(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return `mask_sums` of rows that lie one after another: a `[T]` mask, `[B]` int64 lengths T_i."""
    running = torch.empty(mask.numel() + 1, dtype=torch.int64, device=mask.device)
    running[:1] = 0
    torch.cumsum(mask, 0, dtype=torch.int64, out=running[1:])
    ends = lengths.cumsum(0)
    return running[ends] - running[ends - lengths]


def prompt_denominators(prompt_mask_sums: torch.Tensor, *, prompts_per_sample: float) -> torch.Tensor:
    """Return d_i of `prompt_mean`: M_g * P / N, with 1 in place of an M_g of 0.

    The sum over samples divided by N then equals (1/P) sum_g (sum of the group's tokens) / max(M_g, 1): the token mean
    inside a group, then the mean over groups.

    Args:
        prompt_mask_sums: `[B]` M_g on each row of group g, counted over the whole step; integers or weights.
        prompts_per_sample: P / N of the step; 1 / n with complete groups of n samples.

    Returns:
        `[B]` float64.

    Raises:
        ValueError: `prompts_per_sample` is not a positive finite number.
    """
    if not (math.isfinite(prompts_per_sample) and prompts_per_sample > 0):
        raise ValueError(f"prompts_per_sample must be positive and finite, got {prompts_per_sample!r}")
    return one_for_zero(prompt_mask_sums) * prompts_per_sample


def one_for_zero(totals: torch.Tensor) -> torch.Tensor:
    """Return totals as float64 divisors: 0, which stands over an empty sum, becomes 1."""
    return torch.where(totals == 0, 1, totals).to(torch.float64)


def make_reducer(loss_masks: Sequence[torch.Tensor], *, denominators: torch.Tensor | float) -> Reducer:
    """Build the local sum of the law: x -> sum_i (1 / d_i) sum_t m_it x_it.

    A value at a masked position, NaN and infinity included, reaches neither the sum nor the gradient. Products and
    their pairwise sum are float32, or the values' own dtype if that is wider. The number of operations does not depend
    on B, and none waits for the device. Not for several threads at a time: metrics share scratch memory.

    Args:
        loss_masks: B masks of this rank's tokens, row i `[T_i]`, any dtype, values 0 and 1.
        denominators: d_i > 0, `[B]` or one number for all rows. In `[B]`, zero stands for a row without active tokens
            and acts as 1.

    Returns:
        A reducer of `[T]` values of any float dtype to a scalar, or of `[K, T]` to `[K]`. Its results must still be
        summed over micro-batches and ranks, and divided by Z. It raises ValueError where values have not T elements.
    """
    return make_packed_reducer(concat(loss_masks), row_lengths(loss_masks), denominators=denominators)


def make_packed_reducer(mask: torch.Tensor, lengths: torch.Tensor, *, denominators: torch.Tensor | float) -> Reducer:
    """Build `make_reducer` of rows that lie one after another: a `[T]` mask, `[B]` int64 lengths, d_i as there."""
    if not isinstance(denominators, torch.Tensor):
        token_sum = _weighted_sum(mask, lengths, None)
        return taking_stacks(lambda values: token_sum(values) / denominators)
    if denominators.shape != lengths.shape:
        raise ValueError(
            f"expected one denominator for each of {lengths.numel()} rows, got {tuple(denominators.shape)}"
        )
    return _weighted_sum(mask, lengths, one_for_zero(denominators).reciprocal())


def taking_stacks(reducer: Reducer) -> Reducer:
    """Mark a reducer that maps `[K, T]` to `[K]`, too, and return it."""
    reducer.takes_stacks = True
    return reducer


@dataclass(frozen=True)
class _Weights:
    """What a reducer needs in one dtype, on one device: m_it / d_i `[T]`, and scratch memory of that size."""

    weights: torch.Tensor
    products: torch.Tensor  # fresh memory for each metric would cost more than the arithmetic

    @classmethod
    def of(cls, mask: torch.Tensor, row_weights: torch.Tensor | None, lengths: torch.Tensor) -> _Weights:
        """Spread `[B]` row weights (None: 1) over the tokens of a mask that has the dtype already."""
        weights = mask
        if row_weights is not None:
            # Without output_size, repeat_interleave would wait for the device to learn it.
            weights = torch.repeat_interleave(row_weights.to(mask.dtype), lengths, output_size=mask.numel()).mul_(mask)
        return cls(weights, torch.empty_like(weights))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return sum_t w_t x_t of `[T]` or `[K, T]` values, without what stands at masked positions."""
        if values.device.type not in DEVICES_WITHOUT_WAIT:
            with _without_autocast(values.device.type):
                return self._kept(values) @ self.weights
        total = self._product_sum(values)
        # 0 * NaN is NaN; values are nearly always finite, so that is looked for in the sum alone.
        is_finite = math.isfinite(total if total.dim() == 0 else total.sum())
        return total if is_finite else self._product_sum(self._kept(values))

    def _product_sum(self, values: torch.Tensor) -> torch.Tensor:
        # Pairwise, which a dot product on the CPU is not; its error is that of a sum over each sample.
        scratch = self.products if values.dim() == 1 else None
        return torch.mul(values, self.weights, out=scratch).sum(-1)

    def _kept(self, values: torch.Tensor) -> torch.Tensor:
        return torch.where(self.weights != 0, values, 0).to(self.weights.dtype)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Keep a product in the dtype of its factors; autocast would take it in bfloat16."""
    has_autocast = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if has_autocast else contextlib.nullcontext()


class _WeightedSum(torch.autograd.Function):
    """`_Weights.sum` with its gradient, d / d x_t = w_t, in one multiplication."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weights: _Weights) -> torch.Tensor:
        ctx.weights, ctx.dtype = weights.weights, values.dtype
        return weights.sum(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad.unsqueeze(-1) * ctx.weights).to(ctx.dtype), None


def _weighted_sum(mask: torch.Tensor, lengths: torch.Tensor, row_weights: torch.Tensor | None) -> Reducer:
    """Build x -> sum of `[T]` values times their mask and their row's weight (`[B]` float64, positive; None is 1)."""

    @functools.cache
    def weights_for(dtype: torch.dtype, device: torch.device) -> _Weights:
        wide = torch.promote_types(dtype, torch.float32)
        with torch.inference_mode(False):  # they outlive the first call's inference mode
            rows = None if row_weights is None else row_weights.to(device)
            return _Weights.of(mask.to(device, wide), rows, lengths.to(device))

    def reduce(values: torch.Tensor) -> torch.Tensor:
        if values.shape[-1:] != mask.shape or values.dim() > 2:
            raise ValueError(
                f"a reducer over {mask.numel()} response tokens of {lengths.numel()} rows needs values of shape "
                f"{tuple(mask.shape)}, got {tuple(values.shape)}"
            )
        weights = weights_for(values.dtype, values.device)
        return _WeightedSum.apply(values, weights) if values.requires_grad else weights.sum(values)

    return taking_stacks(reduce)
