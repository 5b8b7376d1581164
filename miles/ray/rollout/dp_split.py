"""Train data -> one shard for each data-parallel rank, step by step, rows that belong together kept together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.ray.rollout.row_groups import (
    add_indices,
    check_complete_groups,
    first_conflict,
    rows_by_id,
    with_shared_columns,
)
from miles.ray.rollout.steps import add_step_columns, fixed_steps, ragged_steps
from miles.utils.errors import UserError
from miles.utils.misc import wants_context
from miles.utils.options import Options
from miles.utils.seqlen_balancing import get_seqlen_balanced_partitions

WHOLE_COLUMNS = ("total_lengths", "raw_reward")
"""Columns that a shard carries for the whole rollout until `process_rollout_data_shard`, as in the host."""

PROMPT_COLUMNS = ("prompt_group_indices", "prompt_counts", "prompt_mask_sums")
"""Columns that a reducer with context may have without `prompt_mean`."""


def split_train_data_by_dp(args: Options, data: dict[str, Any], dp_size: int) -> list[dict[str, Any]]:
    """Return `split_train_data_by_dp_raw`'s shards; the host's entry point, where it also stores them."""
    return split_train_data_by_dp_raw(args, data, dp_size=dp_size)


def split_train_data_by_dp_raw(args: Options, data: dict[str, Any], *, dp_size: int) -> list[dict[str, Any]]:
    """Split train data into one shard for each data-parallel rank, step by step.

    With complete groups, an optimizer step is the next `args.global_batch_size` rollouts of the stream, and inside a
    step, units are dealt to ranks in turn or, with `args.balance_data`, so that token totals are close; a unit is a
    prompt group under `prompt_mean` (kept whole) and a rollout otherwise. With ragged ones, `ragged_steps` splits
    between prompt groups (rollouts where the data names none) into steps of about that size, and rollouts are dealt,
    so that a group may lie on several ranks and a rank may get nothing. The rows of a rollout stay on one rank.

    Args:
        args: Reads `global_batch_size`, `balance_data`, the aggregation mode, `prompt_groups`,
            `loss_weight_normalization` and, of a custom reducer, whether it wants the step's context.
        data: Columns of `convert_samples_to_train_data`. "total_lengths" is added to it.
        dp_size: Number of ranks.

    Returns:
        `dp_size` shards with the rows' columns, "partition" (their positions in `data`), "step_row_counts" (rows in
        each step), the columns of `add_indices` and `add_step_columns` and, still for the whole rollout, the
        `WHOLE_COLUMNS`. Counts and totals that a custom conversion left out beside its ids are filled in; prompt
        columns that are there for a custom reducer alone are left out where a group lies in two steps.

    Raises:
        UserError: columns of rollouts or groups that are missing, short or inconsistent; with complete groups, one
            of another size or that lies in two steps, or groups that do not divide evenly over the ranks; a
            `token_mean` step of which no token is counted.
    """
    args = Options.of(args)
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    mode = LossAggregation.of(args)
    if mode.needs_prompt_groups:
        _check_prompt_columns(data)
    columns = with_shared_columns("prompt", with_shared_columns("rollout", data))
    rollouts = columns.get("rollout_ids", range(len(data["tokens"])))
    groups = columns.get("prompt_group_indices")
    is_ragged = args.prompt_groups == "ragged"
    if is_ragged:
        steps = ragged_steps(rollouts, rollouts if groups is None else groups, args.global_batch_size)
    else:
        steps = fixed_steps(rollouts, args.global_batch_size)
    add_step_columns(columns, steps)
    units = rollouts
    if mode.needs_prompt_groups and not is_ragged:
        assert groups is not None  # checked above
        check_complete_groups(groups, rollouts, args.n_samples_per_prompt)
        _check_complete_steps(groups, steps, dp_size)
        units = groups
    elif groups is not None and not is_ragged and wants_context(args) and _straddling(groups, steps) is not None:
        columns = {key: column for key, column in columns.items() if key not in PROMPT_COLUMNS}
    if mode.counts_tokens and "loss_masks" in columns:
        _check_counted_tokens(args, columns, steps)
    add_indices(columns)
    dealt = [_deal(rows, units, columns["total_lengths"], dp_size, balance=args.balance_data) for rows in steps]
    return [_package_shard(columns, [parts[rank] for parts in dealt]) for rank in range(dp_size)]


def _check_prompt_columns(data: dict[str, Any]) -> None:
    """Check that the columns that `prompt_mean` reads are there."""
    num_rows = len(data["tokens"])
    groups = data.get("prompt_group_indices")
    if groups is None or len(groups) != num_rows:
        raise UserError(
            f"prompt_mean needs prompt_group_indices, the group_index of each of {num_rows} samples, in the train "
            f"data; got {'none' if groups is None else len(groups)}"
        )
    if data.get("prompt_mask_sums") is None:
        raise UserError(f"prompt_mean needs one prompt_mask_sums entry per sample ({num_rows}), got none")


def _check_complete_steps(groups: Sequence[Hashable], steps: Sequence[Sequence[int]], dp_size: int) -> None:
    """Check that each step holds whole groups, and equally many for each rank."""
    straddling = _straddling(groups, steps)
    if straddling is not None:
        group, first, second = straddling
        raise UserError(
            f"the rows of prompt group {group} straddle an optimizer-step boundary (steps {first} and {second}); "
            "order samples by group and make --global-batch-size a multiple of --n-samples-per-prompt, or pass "
            "--prompt-groups ragged"
        )
    for step, rows in enumerate(steps):
        num_groups = len({groups[row] for row in rows})
        if num_groups % dp_size:
            raise UserError(
                f"optimizer step {step} has {num_groups} prompt groups, which is not divisible by dp_size {dp_size}; "
                "prompt_mean keeps each group on one rank, so change --global-batch-size or the number of ranks, or "
                "pass --prompt-groups ragged"
            )


def _straddling(groups: Sequence[Hashable], steps: Sequence[Sequence[int]]) -> tuple[Hashable, int, int] | None:
    """Return the first group that lies in two steps, and these; None where every group lies in one."""
    return first_conflict((groups[row], step) for step, rows in enumerate(steps) for row in rows)


def _check_counted_tokens(args: Options, columns: dict[str, Any], steps: Sequence[Sequence[int]]) -> None:
    """Check that something of each step is counted: an active token, of positive weight where weights are counted."""
    masks, weights = columns["loss_masks"], None
    if args.loss_weight_normalization == "weights":
        weights = columns.get("loss_weights")
    for step, rows in enumerate(steps):
        if any(_is_counted(masks[row], None if weights is None else weights[row]) for row in rows):
            continue
        if not any(any(masks[row]) for row in rows):
            raise UserError(
                f"token_mean needs at least one active token in every optimizer step, and step {step} "
                f"({len(rows)} samples) has none; its samples are all masked"
            )
        raise UserError(
            f"token_mean needs at least one active token of positive loss weight in every optimizer step, and the "
            f"loss_weights of step {step} ({len(rows)} samples) are 0 (in float32) wherever its masks are 1; raise "
            "them, or count tokens with --loss-weight-normalization tokens"
        )


def _is_counted(mask: Sequence[int], weights: Sequence[float] | None) -> bool:
    """Whether a row has an active token whose weight, if any, is positive in the float32 that training holds it in."""
    active = np.asarray(mask) != 0
    return bool(active.any() if weights is None else (active & (np.asarray(weights, dtype=np.float32) > 0)).any())


def _deal(
    rows: Sequence[int], units: Sequence[Hashable], lengths: Sequence[int], dp_size: int, *, balance: bool
) -> list[list[int]]:
    """Deal one step's units to the ranks; return each rank's rows."""
    bundles = [[rows[place] for place in places] for places in rows_by_id([units[row] for row in rows]).values()]
    if balance:
        totals = [sum(lengths[row] for row in bundle) for bundle in bundles]
        chosen = get_seqlen_balanced_partitions(totals, dp_size)
    else:
        chosen = [list(range(rank, len(bundles), dp_size)) for rank in range(dp_size)]
    return [[row for bundle in part for row in bundles[bundle]] for part in chosen]


def _package_shard(data: dict[str, Any], rows_by_step: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Take a rank's rows, step by step, of every per-row column; copy the rest as it is."""
    num_rows = len(data["tokens"])
    partition = [row for rows in rows_by_step for row in rows]
    shard: dict[str, Any] = {"partition": partition, "step_row_counts": [len(rows) for rows in rows_by_step]}
    for key, column in data.items():
        per_row = isinstance(column, (list, tuple)) and len(column) == num_rows and key not in WHOLE_COLUMNS
        shard[key] = [column[row] for row in partition] if per_row else column
    return shard


def process_rollout_data_shard(args: Options, shard: dict[str, Any]) -> dict[str, Any]:
    """Finish a shard on the train side: drop "partition" and reduce the `WHOLE_COLUMNS` to the shard's rows."""
    partition = shard.pop("partition")
    for key in WHOLE_COLUMNS:
        if key in shard:
            shard[key] = [shard[key][row] for row in partition]
    return shard
