"""How per-token losses of one optimizer step become one scalar, exactly, however the step is split.

Every mode is the same expression and only chooses two kinds of numbers, a divisor for each sample and one for the
step:

    value = (1 / Z) * sum_i (1 / d_i) * sum_t m_it * x_it

| mode        | per-sample divisor d_i | step normalizer Z | source                                              |
|-------------|------------------------|-------------------|-----------------------------------------------------|
| sample_mean | max(m_i, 1)            | N                 | GRPO, arXiv 2402.03300                              |
| prompt_mean | max(M_g, 1) * P / N    | N                 | DAPO's equation, arXiv 2503.14476; ScaleRL, 2510.13786 |
| token_mean  | 1                      | M                 | DAPO's code; Megatron-Core's per-token loss         |
| constant    | L                      | N                 | Dr.GRPO, arXiv 2503.20783                           |

`MODES` is that table in code, and everything that needs to know about modes reads it: a mode is one entry there. The
sum over i is a sum over rows, so any split into micro-batches and ranks adds up to it, provided that d_i and Z come
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
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
else:

    class _LazyTorch:
        """`torch`, imported at first use: whoever reads the table of modes alone does not wait a second for it."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _LazyTorch()

Reducer = Callable[["torch.Tensor"], "torch.Tensor"]
"""Maps per-token values `[T]` to a scalar: this micro-batch's and this rank's share of a sum over the step. Those of
this file also map `[K, T]` to `[K]`, and are marked by `taking_stacks`."""

DEVICES_WITHOUT_WAIT = ("cpu",)
"""Devices whose results the program has at once, so that looking at one costs nothing."""


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


@dataclass(frozen=True)
class RowTotals:
    """What the divisors of B rows are made of: totals of the whole optimizer step, int64 or, with weights, float64.

    Attributes:
        samples: `[B]` m_i of each row's sample.
        prompts: `[B]` M_g of each row's prompt group; None where groups are not known.
        counts: N, P and M of the step.
        divisor: L, None where none was given.
        step_samples: `[N]` m_i of every sample of the step, in no particular order; None unless a mode or a custom
            reducer asked for it.
    """

    samples: torch.Tensor
    prompts: torch.Tensor | None
    counts: StepCounts
    divisor: float | None = None
    step_samples: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class LossAggregation:
    """A mode of `--loss-aggregation`: one entry of `MODES`.

    Attributes:
        name: Value of the option.
        summary: What the value of a step is, in one line.
        source: Paper or code that it is from.
        formula: d_i, as text.
        denominators: d_i of B rows: from their `RowTotals` to `[B]` float64, or one number for all rows.
        normalizer_unit: Which of `StepCounts` is Z.
        needs_prompt_groups: d_i reads `RowTotals.prompts`, so every row must name its prompt group.
        needs_divisor: d_i reads `RowTotals.divisor`, so the option `--loss-aggregation-divisor` must be given.
        needs_step_samples: d_i reads `RowTotals.step_samples`.
        is_for_every_loss: SFT takes the mode too. Its loss has no prompt groups, and its reducer is the sample mean
            or, where Z counts tokens, the token mean.
    """

    name: str
    summary: str
    source: str
    formula: str
    denominators: Callable[[RowTotals], torch.Tensor | float]
    normalizer_unit: Literal["num_samples", "num_tokens"] = "num_samples"
    needs_prompt_groups: bool = False
    needs_divisor: bool = False
    needs_step_samples: bool = False
    is_for_every_loss: bool = False

    @property
    def counts_tokens(self) -> bool:
        """Whether Z is M, so that a backend has to divide by the step's tokens and not by its samples."""
        return self.normalizer_unit == "num_tokens"

    def normalizer(self, counts: StepCounts) -> int | float:
        """Return Z of a step.

        Raises:
            ValueError: Z counts tokens, and the step has none: it has no mean.
        """
        total: int | float = getattr(counts, self.normalizer_unit)
        if self.counts_tokens and not total > 0:
            raise ValueError(f"{self.name} needs at least one active token in the optimizer step, got {total}")
        return total

    @staticmethod
    def of(args: Any) -> LossAggregation:
        """Return the mode that a namespace asks for.

        The default is `sample_mean`, and the legacy `calculate_per_token_loss` makes `token_mean` of it.

        Raises:
            ValueError: the namespace names a mode that does not exist.
        """
        name = getattr(args, "loss_aggregation", None)
        name = "sample_mean" if name is None else name
        if name == "sample_mean" and getattr(args, "calculate_per_token_loss", False):
            name = "token_mean"
        if name not in MODES:
            raise ValueError(f"Unknown --loss-aggregation mode {name!r}; choose one of {', '.join(MODES)}")
        return MODES[name]


def _sample_mean(totals: RowTotals) -> torch.Tensor:
    return one_for_zero(totals.samples)


def _prompt_mean(totals: RowTotals) -> torch.Tensor:
    if totals.prompts is None:
        raise ValueError(
            "prompt_mean needs batch['prompt_mask_sums'], the active tokens of each row's whole prompt group; "
            "conversion writes that column under --loss-aggregation prompt_mean"
        )
    counts = totals.counts
    return prompt_denominators(totals.prompts, prompts_per_sample=counts.num_prompts / counts.num_samples)


def _constant(totals: RowTotals) -> float:
    if totals.divisor is None:
        raise ValueError("constant aggregation needs --loss-aggregation-divisor, and the namespace has None")
    return totals.divisor


MODES: dict[str, LossAggregation] = {
    mode.name: mode
    for mode in (
        LossAggregation(
            name="sample_mean",
            summary="mean over samples of each sample's token mean",
            source="GRPO, arXiv:2402.03300",
            formula="max(m_i, 1)",
            denominators=_sample_mean,
            is_for_every_loss=True,
        ),
        LossAggregation(
            name="prompt_mean",
            summary="mean over prompts of each prompt group's token mean",
            source="the equation of DAPO, arXiv:2503.14476; ScaleRL, arXiv:2510.13786",
            formula="max(M_g, 1) * P / N",
            denominators=_prompt_mean,
            needs_prompt_groups=True,
        ),
        LossAggregation(
            name="token_mean",
            summary="mean over all active tokens of the step",
            source="DAPO's code; Megatron's per-token loss",
            formula="1",
            denominators=lambda totals: 1.0,
            normalizer_unit="num_tokens",
            is_for_every_loss=True,
        ),
        LossAggregation(
            name="constant",
            summary="token sum over a fixed length L, mean over samples",
            source="Dr.GRPO, arXiv:2503.20783",
            formula="L",
            denominators=_constant,
            needs_divisor=True,
        ),
    )
}
"""The modes by name, the default first."""


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
    """Build the local sum of the definition: x -> sum_i (1 / d_i) sum_t m_it x_it.

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
    vars(reducer)["takes_stacks"] = True
    return reducer


def takes_stacks(reducer: Reducer) -> bool:
    """Whether a reducer maps `[K, T]` to `[K]`, too."""
    return getattr(reducer, "takes_stacks", False)


@dataclass(frozen=True)
class _Weights:
    """What a reducer needs in one dtype, on one device: m_it / d_i `[T]`, and scratch memory of that size."""

    weights: torch.Tensor
    products: torch.Tensor  # fresh memory for each metric would cost more than the arithmetic

    @classmethod
    def of(cls, mask: torch.Tensor, row_weights: torch.Tensor | None, lengths: torch.Tensor) -> _Weights:
        """Repeat `[B]` row weights (None: 1) for the tokens of a mask that has the dtype already."""
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


@functools.cache
def _weighted_sum_function() -> type[torch.autograd.Function]:
    """Return the autograd function of `_Weights.sum`; made at first use, since its base class is torch's."""

    class WeightedSum(torch.autograd.Function):
        """`_Weights.sum` with its gradient, d / d x_t = w_t, in one multiplication."""

        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, weights: _Weights) -> torch.Tensor:
            ctx.weights, ctx.dtype = weights.weights, values.dtype
            return weights.sum(values)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return (grad.unsqueeze(-1) * ctx.weights).to(ctx.dtype), None

    return WeightedSum


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
        return _weighted_sum_function().apply(values, weights) if values.requires_grad else weights.sum(values)

    return taking_stacks(reduce)
