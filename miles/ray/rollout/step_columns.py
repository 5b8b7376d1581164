"""Columns that only the whole of an optimizer step can tell, made before its rows are dealt to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from miles.ray.rollout.row_ids import first_occurrences, ordinals

NUM_QUARTERS = 4
LONGEST_QUARTER = NUM_QUARTERS - 1


def length_quarters(lengths: Sequence[int]) -> list[int]:
    """Return the quarter that each of N samples belongs to when they stand in a line by length.

    quarter = 3 - floor(4 (N - 1 - rank) / N), rank being the place from 0 in ascending length, the earlier of two
    equal lengths first. Quarters differ by at most one sample, and the longest, 3, is never empty.

    Args:
        lengths: N lengths, in tokens.

    Returns:
        N quarters, 0 (shortest) to 3 (longest).
    """
    size = len(lengths)
    quarters = [0] * size
    for rank, place in enumerate(sorted(range(size), key=lengths.__getitem__)):
        quarters[place] = LONGEST_QUARTER - NUM_QUARTERS * (size - 1 - rank) // size
    return quarters


def add_step_columns(data: dict[str, Any], steps: Sequence[Sequence[int]]) -> None:
    """Add what the rows of a step are to one another, in place.

    Adds "length_quarters", the `length_quarters` of each row's rollout among the rollouts of its step, a rollout being
    as long as all of its rows, masked tokens included; and, where the rows have groups, "step_prompt_counts", 1 on the
    first row of each prompt group in each step, else 0, so that its sum over the rows of a step, wherever they are, is
    the number of prompts in it, also where a group lies in several steps.

    Args:
        data: Columns over all rows; reads "tokens", "response_lengths", "rollout_ids" and "prompt_group_indices" or,
            in modes that need no groups, "sample_group_indices".
        steps: The rows of each optimizer step, which together are all rows.
    """
    num_rows = len(data["tokens"])
    lengths, rollouts = data.get("response_lengths"), data.get("rollout_ids", range(num_rows))
    groups = data.get("prompt_group_indices", data.get("sample_group_indices"))
    if lengths is not None:
        data["length_quarters"] = _spread(steps, num_rows, lambda rows: _quarters_of_rows(lengths, rollouts, rows))
    if groups is not None:
        data["step_prompt_counts"] = _spread(
            steps, num_rows, lambda rows: first_occurrences([groups[row] for row in rows])
        )


def _quarters_of_rows(lengths: Sequence[int], rollouts: Sequence[Hashable], rows: Sequence[int]) -> list[int]:
    """Return the quarter of each row's rollout among those of one step."""
    positions = ordinals([rollouts[row] for row in rows])
    totals = [0] * (max(positions, default=-1) + 1)
    for row, position in zip(rows, positions, strict=True):
        totals[position] += lengths[row]
    quarters = length_quarters(totals)
    return [quarters[position] for position in positions]


def _spread(steps: Sequence[Sequence[int]], num_rows: int, of_step: Callable[[Sequence[int]], list[int]]) -> list[int]:
    """Return a column from what `of_step(rows)` says of the rows of each step."""
    column = [0] * num_rows
    for rows in steps:
        for row, value in zip(rows, of_step(rows), strict=True):
            column[row] = value
    return column
