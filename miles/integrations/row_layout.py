"""The layouts that training loops keep rows of tokens in, and the packed one that reducers work on.

Shapes: B rows, row i with T_i tokens (padded ones all with the same), T = sum_i T_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_aggregation import concat, packed_mask_sums, row_lengths
from miles.backends.training_utils.loss_hub.math_utils import split_like, sum_by
from miles.utils.errors import UserError

RowIndices = slice | Sequence[int]
"""Some of the rows of a rank, such as those of a micro-batch."""

_ACCEPTED = (
    "give masks, as a list of 1-D tensors, one padded [B, T] tensor or a nested tensor; or the number of active "
    "tokens of each row, as integers"
)


@dataclass(frozen=True)
class Rows:
    """Rows one after another.

    Attributes:
        given: The masks, or numbers of tokens, as they came.
        given_weights: The weights as they came, None for ones.
        mask: `[T]` of 0 and 1, None where only numbers of tokens are known.
        weights: `[T]`, None for ones.
        lengths: `[B]` int64 T_i.
        totals: `[B]` active tokens, int64, or the float64 sums of their weights.
    """

    given: Any
    given_weights: Any
    mask: Tensor | None
    weights: Tensor | None
    lengths: Tensor
    totals: Tensor

    @classmethod
    def of(cls, given: Any, weights: Any = None) -> Rows:
        """Read rows in any of the layouts.

        Raises:
            UserError: they are none, a mask has another value than 0 and 1, or weights do not fit or are negative.
        """
        counts = _as_counts(given)
        if counts is not None:
            if weights is not None:
                raise UserError("loss weights belong to tokens; give masks in their layout, not numbers of tokens")
            return cls(given, None, None, None, torch.ones_like(counts), counts)
        mask, lengths = _pack(given, "masks")
        if not ((mask == 0) | (mask == 1)).all():
            raise UserError("a mask has a value other than 0 and 1; give weights as loss_weights")
        if weights is None:
            return cls(given, None, mask, None, lengths, packed_mask_sums(mask, lengths))
        packed, others = _pack(weights, "loss weights")
        if not torch.equal(lengths, others):
            raise UserError(
                f"loss weights need the layout of the masks, rows of {lengths.tolist()} tokens; got {others.tolist()}"
            )
        kept = packed[mask != 0].to(torch.float64)
        if not (kept.isfinite() & (kept >= 0)).all():
            raise UserError("loss weights must be finite and not negative; one is not")
        row_of_token = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
        totals = sum_by(torch.where(mask != 0, packed.to(torch.float64), 0), row_of_token, len(lengths))
        return cls(given, weights, mask, packed, lengths, totals)

    def select(self, rows: RowIndices) -> Rows:
        """Return some of the rows."""
        weights = self.given_weights
        return Rows.of(_take(self.given, rows), None if weights is None else _take(weights, rows))

    def pack(self, values: Any) -> Tensor:
        """Return values in the layout of the rows as `[T]`, or `[K, T]` of K such columns.

        Raises:
            UserError: they have another layout.
        """
        if _is_nested(values):
            packed, lengths = _pack(values, "values")
            fits = torch.equal(lengths.cpu(), self.lengths.cpu())
        elif isinstance(self.given, Tensor) and not _is_nested(self.given):
            fits = isinstance(values, Tensor) and values.dim() in (2, 3) and values.shape[-2:] == self.given.shape
            packed = values.flatten(-2) if fits else values
        else:
            packed = torch.cat(list(values), dim=-1) if isinstance(values, (list, tuple)) and values else values
            fits = isinstance(packed, Tensor) and packed.dim() in (1, 2) and packed.shape[-1] == self.lengths.sum()
        if not fits:
            raise UserError(f"values need the layout of the masks, {_describe(self.given)}; got {_describe(values)}")
        return packed

    def unpack(self, packed: Tensor) -> Any:
        """Return `[T]` values in the layout of the rows."""
        if _is_nested(self.given):
            # Products need the very offsets of the other factor, equal ones are not enough.
            return torch.nested.nested_tensor_from_jagged(packed, self.given.offsets())
        if isinstance(self.given, Tensor):
            return packed.view(self.given.shape)
        return split_like(packed, self.given)


def _is_nested(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_nested


def _as_counts(given: Any) -> Tensor | None:
    """Return numbers of tokens as `[B]` int64; None for anything else, masks above all."""
    is_list = isinstance(given, (list, tuple)) and bool(given) and all(isinstance(entry, int) for entry in given)
    if isinstance(given, Tensor) and not _is_nested(given) and given.dim() == 1 and given.dtype != torch.bool:
        is_list = not given.is_floating_point()
    if not is_list:
        return None
    counts = torch.as_tensor(given, dtype=torch.int64)
    if (counts < 0).any():
        raise UserError(f"numbers of tokens must not be negative; got {counts.tolist()}")
    return counts


def _pack(given: Any, what: str) -> tuple[Tensor, Tensor]:
    """Return rows as `[T]`, and their lengths `[B]` int64, on the rows' device."""
    if _is_nested(given):
        if given.layout is not torch.jagged:
            raise UserError(f"nested {what} need the jagged layout; convert them with layout=torch.jagged")
        return given.values(), given.offsets().diff()
    if isinstance(given, Tensor) and given.dim() == 2:
        return given.flatten(), torch.full((given.shape[0],), given.shape[1], device=given.device)
    is_list = isinstance(given, (list, tuple))
    if not is_list or not all(isinstance(row, Tensor) and row.dim() == 1 for row in given):
        raise UserError(f"these are no {what}: {_describe(given)}; {_ACCEPTED}")
    return concat(given), row_lengths(given)


def _take(given: Any, rows: RowIndices) -> Any:
    if isinstance(given, Tensor) and not _is_nested(given):
        return given[rows if isinstance(rows, slice) else list(rows)]
    entries = list(given.unbind()) if isinstance(given, Tensor) else list(given)
    taken = entries[rows] if isinstance(rows, slice) else [entries[row] for row in rows]
    if isinstance(given, Tensor) and taken:
        return torch.nested.as_nested_tensor(taken, layout=torch.jagged)
    return taken


def _describe(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"a {'nested tensor' if _is_nested(given) else 'tensor'} of shape {tuple(given.shape)}"
    if isinstance(given, (list, tuple)):
        kinds = sorted({_describe(entry) if isinstance(entry, Tensor) else type(entry).__name__ for entry in given})
        return f"a list of {len(given)}" + (f" ({', '.join(kinds[:3])})" if kinds else "")
    return f"{given!r} ({type(given).__name__})"
