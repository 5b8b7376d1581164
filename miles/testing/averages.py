"""How per-token values become one number over a step: each mode in a sentence of its own, one token after another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.backends.training_utils.loss_aggregation import MODES
from miles.testing.step import CustomReducer, Row, Step
from miles.utils.options import Options

Masks = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Weighing:
    """What a mean makes of each token of a step.

    Attributes:
        factors: For each row its T tokens' factors; a token with factor 0 is never looked at.
        counted: For each row what its T tokens add to the count that divides.
    """

    factors: Sequence[Sequence[float]]
    counted: Sequence[Sequence[float]]

    @property
    def total(self) -> float:
        """What is counted of the whole step."""
        return sum(map(sum, self.counted))


def plain_weighing(masks: Masks) -> Weighing:
    """Every active token once."""
    return Weighing(masks, masks)


def kept_weighing(args: Options, rows: Sequence[Row], kept: Masks) -> Weighing:
    """Every kept token once; rejected ones are counted under `--rejected-tokens keep`."""
    return Weighing(kept, {"drop": kept, "keep": [row.mask for row in rows]}[args.rejected_tokens])


def main_weighing(args: Options, rows: Sequence[Row], kept: Masks) -> Weighing:
    """Every kept token by its loss weight; `--loss-weight-normalization` says whether the weights count, or tokens."""
    weights = [row_weights(row) for row in rows]
    counted = kept_weighing(args, rows, kept).counted
    return Weighing(
        _product(kept, weights),
        {"weights": _product(counted, weights), "tokens": counted}[args.loss_weight_normalization],
    )


def row_weights(row: Row) -> Sequence[float]:
    """Return the row's loss weights, 1 where it has none."""
    return [1.0] * len(row.mask) if row.loss_weights is None else row.loss_weights


def _product(masks: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]) -> list[list[float]]:
    return [
        [weight if bit else 0.0 for bit, weight in zip(bits, of_row, strict=True)]
        for bits, of_row in zip(masks, weights, strict=True)
    ]


def rollout_keys(rows: Sequence[Row]) -> list[Hashable]:
    """Return what the rows of one rollout share; a row without a rollout is one."""
    return [("row", place) if row.rollout is None else ("rollout", row.rollout) for place, row in enumerate(rows)]


def aggregate(step: Step, columns: Sequence[Tensor], mode: str, weighing: Weighing) -> Tensor:
    """Return the scalar that a mode names.

    Args:
        step: Gives groups, rollouts and the divisor.
        columns: Values of each row, `[T]`.
        mode: A value of `--loss-aggregation`.
        weighing: Factor and count of each token.
    """
    if mode not in DEFINITIONS:
        raise ValueError(f"the oracle has no definition of mode {mode!r}; it has {', '.join(DEFINITIONS)}")
    return DEFINITIONS[mode](step, columns, weighing)


def _sample_mean(step: Step, columns: Sequence[Tensor], weighing: Weighing) -> Tensor:
    return _mean_over(columns, rollout_keys(step.rows), weighing)


def _prompt_mean(step: Step, columns: Sequence[Tensor], weighing: Weighing) -> Tensor:
    return _mean_over(columns, [row.group for row in step.rows], weighing)


def _token_mean(step: Step, columns: Sequence[Tensor], weighing: Weighing) -> Tensor:
    total, counted = _sum_over(columns, range(len(columns)), weighing)
    return total / counted


def _constant(step: Step, columns: Sequence[Tensor], weighing: Weighing) -> Tensor:
    if step.divisor is None:
        raise ValueError("mode constant needs the step's divisor")
    total, _ = _sum_over(columns, range(len(columns)), weighing)
    return total / (step.divisor * len(set(rollout_keys(step.rows))))


DEFINITIONS: dict[str, Callable[[Step, Sequence[Tensor], Weighing], Tensor]] = {
    "sample_mean": _sample_mean,
    "prompt_mean": _prompt_mean,
    "token_mean": _token_mean,
    "constant": _constant,
}
"""Each mode as a sentence of its own, and not in the common form that the package computes."""


def aggregate_by_reducer(
    step: Step, reducer: CustomReducer, columns: Sequence[Tensor], kept: Masks, weighing: Weighing
) -> Tensor:
    """Return the sum over tokens, each by its weight in the reducer's definition."""
    normalizer = weighing.total if MODES[step.mode].counts_tokens else len(set(rollout_keys(step.rows)))
    defined = reducer.definition(step.rows, kept, normalizer)
    factors = [
        [bit and one * other for bit, one, other in zip(bits, *of_row, strict=True)]
        for bits, *of_row in zip(kept, defined, weighing.factors, strict=True)
    ]
    return _sum_over(columns, range(len(columns)), Weighing(factors, weighing.counted))[0]


def _mean_over(columns: Sequence[Tensor], keys: Sequence[Hashable], weighing: Weighing) -> Tensor:
    """Mean over the sets of rows that share a key of the token mean in each; one of which nothing counts is 0."""
    total = torch.zeros((), dtype=torch.float64)
    for key in set(keys):
        inside, counted = _sum_over(columns, [i for i, other in enumerate(keys) if other == key], weighing)
        if counted:
            total = total + inside / counted
    return total / len(set(keys))


def _sum_over(columns: Sequence[Tensor], members: Sequence[int], weighing: Weighing) -> tuple[Tensor, float]:
    total, counted = torch.zeros((), dtype=torch.float64), 0.0
    for i in members:
        for place, factor in enumerate(weighing.factors[i]):
            if factor:
                total = total + factor * columns[i][place]
        counted += sum(weighing.counted[i])
    return total, counted
