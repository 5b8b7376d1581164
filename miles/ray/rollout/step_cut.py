"""Where a rollout is cut into optimizer steps.

R rollouts, a global batch of B rollouts, U units (prompt groups where they matter, else rollouts) that no cut divides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise

from miles.ray.rollout.row_ids import ordinals, rows_by_id


def fixed_steps(rollouts: Sequence[Hashable], global_batch_size: int) -> list[list[int]]:
    """Return the rows of each optimizer step, a step being the next B distinct rollouts.

    Args:
        rollouts: Each row's rollout.
        global_batch_size: B.
    """
    positions = ordinals(rollouts)
    steps: list[list[int]] = [[] for _ in range(-(-(max(positions) + 1) // global_batch_size))]
    for row, position in enumerate(positions):
        steps[position // global_batch_size].append(row)
    return steps


def ragged_steps(rollouts: Sequence[Hashable], units: Sequence[Hashable], global_batch_size: int) -> list[list[int]]:
    """Return the rows of each optimizer step where steps hold whole units and about B rollouts each.

    S = max(1, round(R / B)) steps, halves rounded up, but no more than U. The k-th cut is the unit boundary nearest to
    k R / S in cumulative rollouts, the lower of two equally near ones, such that no step is empty. Units are taken in
    order of first appearance, each with all of its rows.

    Args:
        rollouts: Each row's rollout.
        units: Each row's unit; the rows of a rollout are of one unit.
        global_batch_size: B.
    """
    members = list(rows_by_id(units).values())
    ends = list(accumulate(len({rollouts[row] for row in rows}) for rows in members))
    num_steps = min(max(1, (2 * ends[-1] + global_batch_size) // (2 * global_batch_size)), len(members))
    cuts = [0, *_cuts(ends, num_steps), len(members)]
    return [sorted(row for rows in members[start:end] for row in rows) for start, end in pairwise(cuts)]


def _cuts(ends: Sequence[int], num_steps: int) -> list[int]:
    """Return after how many units each step but the last ends, given the rollouts up to the end of each unit."""
    cuts: list[int] = []
    for k in range(1, num_steps):
        target = k * ends[-1]  # in units of 1 / S rollouts, so that the comparison is one of integers
        above = bisect_left(ends, target, key=lambda end: end * num_steps)
        is_lower_nearer = above > 0 and target - ends[above - 1] * num_steps <= ends[above] * num_steps - target
        nearest = above if is_lower_nearer else above + 1
        first, last = (cuts[-1] if cuts else 0) + 1, len(ends) - (num_steps - k)
        cuts.append(min(max(nearest, first), last))
    return cuts
