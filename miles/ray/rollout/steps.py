"""How a rollout is split into optimizer steps, and what only the whole of a step can tell of its rows.

R rollouts, a global batch of B rollouts, U units (prompt groups where they matter, else rollouts), each whole in one
step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from miles.ray.rollout.row_groups import dense_indices, first_occurrences, rows_by_id, totals_by_id

NUM_QUARTERS = 4
LONGEST_QUARTER = NUM_QUARTERS - 1


def fixed_steps(rollouts: Sequence[Hashable], global_batch_size: int) -> list[list[int]]:
    """Return the rows of each optimizer step, a step being the next B distinct rollouts.

    Args:
        rollouts: Each row's rollout.
        global_batch_size: B.
    """
    return list(rows_by_id([position // global_batch_size for position in dense_indices(rollouts)]).values())


def ragged_steps(rollouts: Sequence[Hashable], units: Sequence[Hashable], global_batch_size: int) -> list[list[int]]:
    """Return the rows of each optimizer step where steps hold whole units and about B rollouts each.

    S = max(1, round(R / B)) steps, halves rounded up, but no more than U. The k-th step ends at the unit boundary
    nearest to k R / S in cumulative rollouts, the lower of two equally near ones, such that no step is empty. Units
    are taken in order of first appearance, each with all of its rows.

    Args:
        rollouts: Each row's rollout.
        units: Each row's unit; the rows of a rollout are of one unit.
        global_batch_size: B.
    """
    members = list(rows_by_id(units).values())
    ends = list(accumulate(len({rollouts[row] for row in rows}) for rows in members))
    num_steps = min(max(1, (2 * ends[-1] + global_batch_size) // (2 * global_batch_size)), len(members))
    bounds = [0, *_inner_ends(ends, num_steps), len(members)]
    return [sorted(row for rows in members[start:end] for row in rows) for start, end in pairwise(bounds)]


def _inner_ends(ends: Sequence[int], num_steps: int) -> list[int]:
    """Return after how many units each step but the last ends, given the rollouts up to the end of each unit."""
    bounds: list[int] = []
    for k in range(1, num_steps):
        target = k * ends[-1]  # in units of 1 / S rollouts, so that the comparison is one of integers
        above = bisect_left(ends, target, key=lambda end: end * num_steps)
        is_lower_nearer = above > 0 and target - ends[above - 1] * num_steps <= ends[above] * num_steps - target
        nearest = above if is_lower_nearer else above + 1
        first, last = (bounds[-1] if bounds else 0) + 1, len(ends) - (num_steps - k)
        bounds.append(min(max(nearest, first), last))
    return bounds


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
        data["length_quarters"] = _column(steps, num_rows, lambda rows: _quarters_of_rows(lengths, rollouts, rows))
    if groups is not None:
        data["step_prompt_counts"] = _column(
            steps, num_rows, lambda rows: first_occurrences([groups[row] for row in rows])
        )


def _quarters_of_rows(lengths: Sequence[int], rollouts: Sequence[Hashable], rows: Sequence[int]) -> list[int]:
    """Return the quarter of each row's rollout among those of one step."""
    ids = [rollouts[row] for row in rows]
    totals = totals_by_id(ids, (lengths[row] for row in rows))
    quarters = dict(zip(totals, length_quarters(list(totals.values())), strict=True))
    return [quarters[id_] for id_ in ids]


def _column(steps: Sequence[Sequence[int]], num_rows: int, of_step: Callable[[Sequence[int]], list[int]]) -> list[int]:
    """Return a column from what `of_step(rows)` says of the rows of each step."""
    column = [0] * num_rows
    for rows in steps:
        for row, value in zip(rows, of_step(rows), strict=True):
            column[row] = value
    return column
