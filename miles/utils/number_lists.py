"""Long lists of plain Python numbers, looked at and turned into arrays at the speed of a copy in C.

numpy asks every element for its type in two passes. `marshal` writes a list in one, each number behind a tag of its
exact type, so that one comparison of the tags tells that all are `int` (or all `float`).
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

LAYOUTS = {
    int: (b"i", np.dtype([("tag", "S1"), ("value", "<i4")])),
    float: (b"g", np.dtype([("tag", "S1"), ("value", "<f8")])),
}
"""How version 2 of the format, which knows no back references, writes an int of 32 bits and a float."""

LIST_HEADER = 5
"""Bytes before the first element: a tag and a length."""


def plain_numbers(values: Any, kind: type) -> np.ndarray | None:
    """Return the values of a list whose every element is of exactly one type, without a look at each from Python.

    Args:
        values: Anything.
        kind: `int` or `float`.

    Returns:
        int32 or float64 array, read-only; None where the values are no list, or one of them is of another type (bool
        is not int), or an int of more than 32 bits.
    """
    if type(values) is not list or (values and type(values[0]) is not kind):
        return None
    tag, layout = LAYOUTS[kind]
    try:
        written = marshal.dumps(values, 2)
    except ValueError:  # an element that marshal does not write
        return None
    # An element of another type would put its tag, or those after it, elsewhere: if each stands where it should, each
    # element before it was of the right size, and so on from the first.
    if len(written) != LIST_HEADER + len(values) * layout.itemsize:
        return None
    elements = np.frombuffer(written, dtype=layout, offset=LIST_HEADER)
    return elements["value"] if (elements["tag"] == tag).all() else None


def smallest_and_largest(values: Sequence[int]) -> tuple[int, int]:
    """Return the least and the greatest of at least one integer."""
    plain = plain_numbers(values, int)
    return (min(values), max(values)) if plain is None else (int(plain.min()), int(plain.max()))


def flat_tensor(rows: Sequence[Iterable[Any]], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of all rows, one row after the other, as one tensor on the CPU.

    Args:
        rows: Lists, arrays or tensors of numbers.
        dtype: Of the result.
    """
    import torch  # here, since those who read lists alone do without it

    kind = float if dtype.is_floating_point else int
    arrays = [_numbers(row, kind, dtype) for row in rows]
    joined = np.concatenate(arrays, dtype=np.float64 if kind is float else np.int64) if arrays else np.empty(0)
    return torch.from_numpy(joined).to(dtype)


def _numbers(row: Iterable[Any], kind: type, dtype: torch.dtype) -> np.ndarray:
    import torch

    plain = plain_numbers(row, kind)
    return torch.tensor(list(row), dtype=dtype).numpy() if plain is None else plain
