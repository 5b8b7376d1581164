"""What rows are called, which rollout and prompt group they belong to, and what those that belong together share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from miles.utils.errors import UserError
from miles.utils.types import Sample

Number = TypeVar("Number", int, float)

ID_COLUMN_OF = {"rollout": "rollout_ids", "prompt": "prompt_group_indices"}
"""The column that says which rows belong together, for each kind."""

_WORDS = {"rollout": "rollout", "prompt": "prompt group"}


def name_of(sample: Sample, position: int) -> str:
    """Return how messages name a row, on one line: its position in the rollout and its own indices."""
    return " ".join(f"sample {position} (index={sample.index}, group_index={sample.group_index})".split())


def rollout_ids_of(samples: Sequence[Sample]) -> list[Hashable]:
    """Return each row's rollout: its `rollout_id`, or the row itself where it has none."""
    return [("row", i) if sample.rollout_id is None else sample.rollout_id for i, sample in enumerate(samples)]


def dense_indices(ids: Sequence[Hashable]) -> list[int]:
    """Return, for each id, its position among the distinct ones in order of first appearance."""
    positions: dict[Hashable, int] = {}
    return [positions.setdefault(id_, len(positions)) for id_ in ids]


def first_occurrences(ids: Sequence[Hashable]) -> list[int]:
    """Return 1 at the first position of each distinct id and 0 elsewhere; the sum is the number of ids."""
    first_rows = {rows[0] for rows in rows_by_id(ids).values()}
    return [int(row in first_rows) for row in range(len(ids))]


def rows_by_id(ids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the rows of each distinct id, ids in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for row, id_ in enumerate(ids):
        members.setdefault(id_, []).append(row)
    return members


def totals_by_id(ids: Iterable[Hashable], values: Iterable[Number]) -> dict[Hashable, Number]:
    """Return the sum of the values of each distinct id, ids in order of first appearance."""
    totals: dict[Hashable, Number] = {}
    for id_, value in zip(ids, values, strict=True):
        totals[id_] = totals[id_] + value if id_ in totals else value
    return totals


def samples_by_group(groups: Iterable[Hashable], samples: Iterable[Hashable]) -> dict[Hashable, int]:
    """Return how many distinct samples the rows of each group have, groups in order of first appearance."""
    members: dict[Hashable, set[Hashable]] = {}
    for group, sample in zip(groups, samples, strict=True):
        members.setdefault(group, set()).add(sample)
    return {group: len(found) for group, found in members.items()}


def first_conflict(pairs: Iterable[tuple[Hashable, Any]]) -> tuple[Hashable, Any, Any] | None:
    """Return the first id of (id, value) pairs that comes with two values, and these; None where each has one."""
    known: dict[Hashable, Any] = {}
    for id_, value in pairs:
        if known.setdefault(id_, value) != value:
            return id_, known[id_], value
    return None


def shared_columns(kind: str, ids: Sequence[Hashable], loss_masks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the columns of rows that share a divisor.

    Args:
        kind: "rollout" or "prompt".
        ids: Each row's rollout or prompt group.
        loss_masks: Each row's mask.

    Returns:
        The ids under the kind's `ID_COLUMN_OF`, `{kind}_counts` (1 on the first row of each id, else 0) and
        `{kind}_mask_sums` (the active tokens of all rows of the id).
    """
    totals = totals_by_id(ids, (int(sum(mask)) for mask in loss_masks))
    return {
        ID_COLUMN_OF[kind]: list(ids),
        f"{kind}_counts": first_occurrences(ids),
        f"{kind}_mask_sums": [totals[id_] for id_ in ids],
    }


def add_indices(data: dict[str, Any]) -> None:
    """Number the rollouts, and the prompt groups where there are any, of the whole train data; in place.

    Adds "rollout_indices" (0 to R - 1) and, beside "prompt_group_indices", "prompt_indices" (0 to P - 1): on each
    row, the position of its rollout or group among the distinct ones in order of first appearance. Ranks that hold
    shards of the same data can then add up totals of rollouts and groups without telling each other their ids.

    Args:
        data: Columns over all rows; reads "tokens", "rollout_ids" and "prompt_group_indices".
    """
    data["rollout_indices"] = dense_indices(data.get("rollout_ids", range(len(data["tokens"]))))
    if "prompt_group_indices" in data:
        data["prompt_indices"] = dense_indices(data["prompt_group_indices"])


def check_one_group_each(rollouts: Sequence[Hashable], groups: Sequence[Hashable]) -> None:
    """Check that the rows of a rollout answer one prompt; rows without a group (None) are left out.

    Raises:
        UserError: naming a rollout that spans several groups.
    """
    conflict = first_conflict(pair for pair in zip(rollouts, groups, strict=True) if pair[1] is not None)
    if conflict is not None:
        rollout, first, second = conflict
        raise UserError(
            f"rollout_id {rollout} spans several prompt groups, group_index {first} and {second}; a rollout answers "
            "one prompt, so give all of its rows one group_index, or other rollouts other ids"
        )


def check_complete_groups(groups: Sequence[Hashable], rollouts: Sequence[Hashable], size: int) -> None:
    """Check that every prompt group has `size` rollouts.

    Raises:
        UserError: with how many have not, and the first of them.
    """
    sizes = samples_by_group(groups, rollouts)
    wrong = {group: found for group, found in sizes.items() if found != size}
    if wrong:
        group, found = next(iter(wrong.items()))
        raise UserError(
            f"prompt_mean needs complete prompt groups of n_samples_per_prompt={size} samples; {len(wrong)} of "
            f"{len(sizes)} groups are not, for example group_index {group} with {found}; set --n-samples-per-prompt "
            "to the rollout's group size, or pass --prompt-groups ragged"
        )


def with_shared_columns(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the columns and, where there are ids of the kind, those of `shared_columns` that are missing.

    Args:
        kind: "rollout" or "prompt".
        data: Columns over all rows; left alone.

    Raises:
        UserError: given counts that do not count each id once, or given totals that are not those of the masks.
    """
    if ID_COLUMN_OF[kind] not in data:
        return dict(data)
    ids = data[ID_COLUMN_OF[kind]]
    computed = shared_columns(kind, ids, data["loss_masks"])
    columns = {**computed, **data}
    _check_counts(kind, ids, columns[f"{kind}_counts"])
    _check_mask_sums(kind, ids, columns[f"{kind}_mask_sums"], computed[f"{kind}_mask_sums"])
    return columns


def _check_mask_sums(kind: str, ids: Sequence[Hashable], sums: Sequence[int], expected: Sequence[int]) -> None:
    """Check that every row carries the total of its rollout or prompt group: the active tokens of all rows of it."""
    column = f"{kind}_mask_sums"
    if len(sums) != len(ids):
        raise UserError(
            f"train data with {ID_COLUMN_OF[kind]} needs one {column} entry per sample ({len(ids)}), got {len(sums)}"
        )
    for id_, total, of_masks in zip(ids, sums, expected, strict=True):
        if total != of_masks:
            raise UserError(
                f"inconsistent {column} in {_WORDS[kind]} {id_}: {total}, and its loss masks have {of_masks} active "
                f"tokens; every row of a {_WORDS[kind]} must carry its total. Leave {column} out to have it filled in"
            )


def _check_counts(kind: str, ids: Sequence[Hashable], counts: Sequence[int]) -> None:
    """Check that each rollout or prompt group counts once."""
    for id_, total in totals_by_id(ids, counts).items():
        if total != 1:
            raise UserError(
                f"{kind}_counts of {_WORDS[kind]} {id_} add up to {total}; put 1 on one row of each {_WORDS[kind]} "
                "and 0 on its other rows, or leave the column out"
            )
