"""What a row is called, and which rollout it is a part of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from miles.utils.types import Sample


def name_of(sample: Sample, position: int) -> str:
    """Return how messages name a row, on one line: its position in the rollout and its own indices."""
    return " ".join(f"sample {position} (index={sample.index}, group_index={sample.group_index})".split())


def rollout_ids_of(samples: Sequence[Sample]) -> list[Hashable]:
    """Return each row's rollout: its `rollout_id`, or the row itself where it has none."""
    return [("row", i) if sample.rollout_id is None else sample.rollout_id for i, sample in enumerate(samples)]


def ordinals(ids: Sequence[Hashable]) -> list[int]:
    """Return, for each id, its position among the distinct ones in order of first appearance."""
    positions: dict[Hashable, int] = {}
    return [positions.setdefault(id_, len(positions)) for id_ in ids]


def first_occurrences(ids: Sequence[Hashable]) -> list[int]:
    """Return 1 at the first position of each distinct id and 0 elsewhere; the sum is the number of ids."""
    seen: set[Hashable] = set()
    return [0 if id_ in seen else (seen.add(id_) or 1) for id_ in ids]


def rows_by_id(ids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the rows of each distinct id, ids in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for row, id_ in enumerate(ids):
        members.setdefault(id_, []).append(row)
    return members
