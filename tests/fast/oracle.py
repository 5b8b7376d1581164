"""The definition in exact fractions: loops over samples and tokens, sharing no code and no shape with the package.

Each mode is its own sentence of the table of modes, not the common form `(1/Z) sum_i (1/d_i) sum_t m x` that the
package computes, so the two can only agree by both being right.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")


@dataclass(frozen=True)
class Row:
    """One training row. `rollout=None`: the row is a rollout of its own.

    `kept` is the mask that a correction left, `loss_weights` weighs tokens; None: the mask itself, weights of 1.
    """

    mask: tuple[int, ...]
    values: tuple[Fraction, ...]
    group: int = 0
    rollout: int | None = None
    prompt_length: int = 2
    kept: tuple[int, ...] | None = None
    loss_weights: tuple[Fraction, ...] | None = None

    @staticmethod
    def of(mask: Iterable[int], values: Iterable[float], **fields: int | None) -> Row:
        """Build a row from plain numbers (floats are taken as the exact binary fraction they are)."""
        return Row(tuple(mask), tuple(Fraction(value) for value in values), **fields)

    @property
    def response_length(self) -> int:
        return len(self.mask)

    @property
    def total_length(self) -> int:
        return self.prompt_length + len(self.mask)

    @property
    def kept_mask(self) -> tuple[int, ...]:
        return self.mask if self.kept is None else self.kept

    @property
    def token_weights(self) -> tuple[Fraction | int, ...]:
        return (1,) * len(self.mask) if self.loss_weights is None else self.loss_weights

    def masked_sum(self, values: Sequence[Fraction | int]) -> Fraction:
        """Weighted sum of the values at kept tokens; what stands at any other position is never looked at."""
        total = Fraction(0)
        for bit, weight, value in zip(self.kept_mask, self.token_weights, values, strict=True):
            if bit and value:
                total += weight * value
        return total


@dataclass(frozen=True)
class Counting:
    """What the divisors count of a token: two values of `--rejected-tokens` and `--loss-weight-normalization`."""

    rejected_tokens: str = "drop"
    loss_weight_normalization: str = "weights"

    def total(self, row: Row) -> Fraction | int:
        """What is counted of a row."""
        mask = {"drop": row.kept_mask, "keep": row.mask}[self.rejected_tokens]
        weights = {"weights": row.token_weights, "tokens": (1,) * len(mask)}[self.loss_weight_normalization]
        return sum(weight for bit, weight in zip(mask, weights, strict=True) if bit)


DEFAULT = Counting()


def unweighted(rows: Iterable[Row]) -> list[Row]:
    """The rows with every weight 1, as metrics and auxiliary terms see them by default."""
    return [replace(row, loss_weights=None) for row in rows]


def original(rows: Iterable[Row]) -> list[Row]:
    """The rows before any correction and without weights, as mismatch metrics see them."""
    return [replace(row, kept=None, loss_weights=None) for row in rows]


def _together(rows: Sequence[Row], keys: Iterable[Hashable]) -> list[list[int]]:
    """Indices of the rows that share a key, in order of first appearance."""
    gathered: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        gathered.setdefault(key, []).append(index)
    assert sum(map(len, gathered.values())) == len(rows)
    return list(gathered.values())


def rollouts(rows: Sequence[Row]) -> list[list[int]]:
    """Row indices of each rollout."""
    return _together(rows, [("row", i) if row.rollout is None else row.rollout for i, row in enumerate(rows)])


def groups(rows: Sequence[Row]) -> list[list[int]]:
    """Row indices of each prompt group."""
    return _together(rows, [row.group for row in rows])


def num_tokens(rows: Sequence[Row]) -> int:
    """Active tokens of the step, before any correction."""
    return sum(sum(row.mask) for row in rows)


def mean_over(
    rows: Sequence[Row],
    sets: list[list[int]],
    column: Sequence[Sequence[Fraction | int]],
    counting: Counting = DEFAULT,
) -> Fraction:
    """Mean over the sets of the token mean inside each; a set of which nothing is counted counts as zero."""
    total = Fraction(0)
    for members in sets:
        inside = Fraction(0)
        tokens = Fraction(0)
        for i in members:
            inside += rows[i].masked_sum(column[i])
            tokens += counting.total(rows[i])
        if tokens:
            total += inside / tokens
    return total / len(sets)


def value(
    rows: Sequence[Row],
    mode: str,
    divisor: float | None = None,
    column: Sequence[Sequence[Fraction | int]] | None = None,
    counting: Counting = DEFAULT,
) -> Fraction:
    """The scalar that `mode` names, of the rows' values or of another per-token `column`.

    Raises:
        ZeroDivisionError: a `token_mean` of which nothing is counted; such a step is skipped.
    """
    column = [row.values for row in rows] if column is None else column
    if mode == "sample_mean":
        return mean_over(rows, rollouts(rows), column, counting)
    if mode == "prompt_mean":
        return mean_over(rows, groups(rows), column, counting)
    everything = sum((row.masked_sum(xs) for row, xs in zip(rows, column, strict=True)), Fraction(0))
    if mode == "token_mean":
        return everything / sum(counting.total(row) for row in rows)
    assert mode == "constant", mode
    return everything / (Fraction(divisor) * len(rollouts(rows)))


def weights(
    rows: Sequence[Row], mode: str, divisor: float | None = None, counting: Counting = DEFAULT
) -> tuple[tuple[Fraction, ...], ...]:
    """d value / d x of every token: the value is linear in x, so raising one token from 0 to 1 gives it exactly."""
    return _weights(tuple(rows), mode, divisor, counting)


@functools.lru_cache(maxsize=1024)
def _weights(
    rows: tuple[Row, ...], mode: str, divisor: float | None, counting: Counting
) -> tuple[tuple[Fraction, ...], ...]:
    slopes = []
    for i, row in enumerate(rows):
        slopes.append([])
        for t in range(row.response_length):
            column = [[0] * other.response_length for other in rows]
            column[i][t] = 1
            slopes[i].append(value(rows, mode, divisor, column, counting))
    return tuple(map(tuple, slopes))


def remask(row: Row, mask: Iterable[int]) -> Row:
    """The same row under another mask."""
    return replace(row, mask=tuple(mask))


# ---- the faults that the cases name, each the formula it would have been -------------------------------------------


def microbatches(layout: list[list[list[int]]]) -> list[list[int]]:
    """Every micro-batch of every rank."""
    return [batch for rank in layout for batch in rank]


def _local_token_mean(rows: Sequence[Row], indices: Iterable[int]) -> Fraction:
    chosen = [rows[i] for i in indices]
    return value(chosen, "token_mean")


def fault_value(case_id: str, rows: Sequence[Row], layout: list[list[list[int]]], divisor: float | None) -> Fraction:
    """What the named fault makes of a case (`wrong` in the data file), for the faults that one line restates."""
    per_batch = microbatches(layout)
    per_rank = [[i for batch in rank for i in batch] for rank in layout]
    summed = sum((row.masked_sum(row.values) for row in rows), Fraction(0))
    all_ones = [remask(row, [1] * row.response_length) for row in rows]

    def mean(items: Iterable[Fraction]) -> Fraction:
        items = list(items)
        return sum(items, Fraction(0)) / len(items)

    def shares_within_batches() -> Fraction:
        """Each row's sum over the tokens of its group that are in its micro-batch, averaged over the groups."""
        total = Fraction(0)
        for batch in per_batch:
            for members in groups([rows[i] for i in batch]):
                local = [rows[batch[m]] for m in members]
                if num_tokens(local):
                    total += value(local, "token_mean")
        return total / len(groups(rows))

    def strided_groups() -> Fraction:
        """Groups taken as equal slices of the row order instead of by their index."""
        size = -(-len(rows) // len(groups(rows)))
        return mean(value(rows[s : s + size], "token_mean") for s in range(0, len(rows), size))

    faults = {
        "constant-no-batch-mean": lambda: summed / Fraction(divisor),
        "token-mean-times-sample-share": lambda: mean(_local_token_mean(rows, batch) for batch in per_batch),
        "per-rank-divisor": lambda: mean(_local_token_mean(rows, indices) for indices in per_rank),
        "accumulation-mean-of-means": lambda: mean(_local_token_mean(rows, batch) for batch in per_batch),
        "masked-after-count": lambda: summed / num_tokens(all_ones),
        "phantom-token": lambda: summed / sum(max(sum(row.mask), 1) for row in rows),
        "cp-count-inflated": lambda: summed / (2 * num_tokens(rows)),
        "normalizer-dropped": lambda: summed / len(layout),
        "rows-not-rollouts": lambda: value([Row(row.mask, row.values, row.group) for row in rows], "sample_mean"),
        "numerator-unmasked": lambda: sum((sum(row.values, Fraction(0)) for row in rows), Fraction(0))
        / num_tokens(rows),
        "group-split-local-divisor": shares_within_batches,
        "ragged-groups": strided_groups,
        "response-length-not-mask": lambda: summed / num_tokens(all_ones),
        "local-mean-no-accumulation": lambda: sum(
            (_local_token_mean(rows, batch) for batch in per_batch), Fraction(0)
        ),
    }
    return faults[case_id]()
