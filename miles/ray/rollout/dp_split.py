"""Train data -> one shard for each data-parallel rank, step by step, groups kept whole where the mode needs it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Sequence
from typing import Any

from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.ray.rollout.row_checks import check_columns
from miles.ray.rollout.row_ids import first_occurrences
from miles.utils.errors import UserError
from miles.utils.seqlen_balancing import get_seqlen_balanced_partitions

WHOLE_COLUMNS = ("total_lengths", "raw_reward")
"""Columns that a shard carries for the whole rollout until `process_rollout_data_shard`, as in the host."""


def split_train_data_by_dp(args: Namespace, data: dict[str, Any], dp_size: int) -> list[dict[str, Any]]:
    """Return `split_train_data_by_dp_raw`'s shards; the host's entry point, where it also stores them."""
    return split_train_data_by_dp_raw(args, data, dp_size=dp_size)


def split_train_data_by_dp_raw(args: Namespace, data: dict[str, Any], *, dp_size: int) -> list[dict[str, Any]]:
    """Cut train data into one shard for each data-parallel rank, step by step.

    An optimizer step is the next `args.global_batch_size` rollouts of the stream. Inside a step, units are dealt to
    ranks in turn or, with `args.balance_data`, so that token totals are close; a unit is a prompt group under
    `prompt_mean` (kept whole) and a rollout otherwise. Nothing moves between steps.

    Args:
        args: Reads `global_batch_size`, `balance_data`, the aggregation mode, `prompt_groups`.
        data: Columns of `convert_samples_to_train_data`. "total_lengths" is added to it.
        dp_size: Number of ranks.

    Returns:
        `dp_size` shards with the rows' columns, "partition" (their positions in `data`), "step_row_counts" (rows in
        each step) and, still for the whole rollout, the `WHOLE_COLUMNS`.

    Raises:
        UserError: group columns that are missing, short or inconsistent; a group in two steps; groups that do not
            spread evenly over the ranks; a `token_mean` step without an active token.
    """
    num_rows = len(data["tokens"])
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    rollouts = data.get("rollout_ids", range(num_rows))
    steps = _rows_by_step(rollouts, args.global_batch_size)
    mode = LossAggregation.of(args)
    units = rollouts
    if mode is LossAggregation.PROMPT_MEAN:
        units = _checked_groups(args, data, steps, dp_size, default_units=rollouts)
    if mode is LossAggregation.TOKEN_MEAN and "loss_masks" in data:
        _check_active_tokens(data["loss_masks"], steps)
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    step_row_counts: list[list[int]] = [[] for _ in range(dp_size)]
    for rows in steps:
        for rank, part in enumerate(_deal(rows, units, data["total_lengths"], dp_size, balance=args.balance_data)):
            partitions[rank].extend(part)
            step_row_counts[rank].append(len(part))
    return [
        _package_shard(data, partition, counts) for partition, counts in zip(partitions, step_row_counts, strict=True)
    ]


def _rows_by_step(rollouts: Sequence[Hashable], global_batch_size: int) -> list[list[int]]:
    """Return the rows of each optimizer step, a step being the next `global_batch_size` distinct rollouts."""
    order: dict[Hashable, int] = {}
    steps: list[list[int]] = []
    for row, rollout in enumerate(rollouts):
        step = order.setdefault(rollout, len(order)) // global_batch_size
        steps.extend([] for _ in range(step + 1 - len(steps)))
        steps[step].append(row)
    return steps


def _deal(
    rows: Sequence[int], units: Sequence[Hashable], lengths: Sequence[int], dp_size: int, *, balance: bool
) -> list[list[int]]:
    """Deal one step's units to the ranks; return each rank's rows."""
    members: dict[Hashable, list[int]] = {}
    for row in rows:
        members.setdefault(units[row], []).append(row)
    bundles = list(members.values())
    if balance:
        totals = [sum(lengths[row] for row in bundle) for bundle in bundles]
        chosen = get_seqlen_balanced_partitions(totals, dp_size)
    else:
        chosen = [range(rank, len(bundles), dp_size) for rank in range(dp_size)]
    return [[row for bundle in part for row in bundles[bundle]] for part in chosen]


def _checked_groups(
    args: Namespace,
    data: dict[str, Any],
    steps: Sequence[Sequence[int]],
    dp_size: int,
    *,
    default_units: Sequence[Hashable],
) -> Sequence[Hashable]:
    """Return the units of a `prompt_mean` split, after checking the group columns."""
    groups, sums = data.get("prompt_group_indices"), data.get("prompt_mask_sums")
    num_rows = len(data["tokens"])
    if groups is None or len(groups) != num_rows:
        raise UserError(
            f"prompt_mean needs prompt_group_indices, the group_index of each of {num_rows} samples, in the train "
            f"data; got {'none' if groups is None else len(groups)}"
        )
    if sums is None or len(sums) != num_rows:
        raise UserError(
            f"prompt_mean needs one prompt_mask_sums entry per sample ({num_rows}), "
            f"got {'none' if sums is None else len(sums)}"
        )
    known: dict[Hashable, int] = {}
    for group, total in zip(groups, sums, strict=True):
        if known.setdefault(group, total) != total:
            raise UserError(
                f"inconsistent prompt_mask_sums in prompt group {group}: {known[group]} and {total}; "
                "every row of a group must carry the group's total"
            )
    data.setdefault("prompt_counts", first_occurrences(groups))
    _check_steps_of_groups(groups, steps)
    if getattr(args, "prompt_groups", "complete") != "complete":
        return default_units
    for step, rows in enumerate(steps):
        num_groups = len({groups[row] for row in rows})
        if num_groups % dp_size:
            raise UserError(
                f"optimizer step {step} has {num_groups} prompt groups, which is not divisible by dp_size {dp_size}; "
                "prompt_mean keeps each group on one rank, so change --global-batch-size or the number of ranks"
            )
    return groups


def _check_steps_of_groups(groups: Sequence[Hashable], steps: Sequence[Sequence[int]]) -> None:
    step_of: dict[Hashable, int] = {}
    for step, rows in enumerate(steps):
        for row in rows:
            if step_of.setdefault(groups[row], step) != step:
                raise UserError(
                    f"the rows of prompt group {groups[row]} straddle an optimizer-step boundary (steps "
                    f"{step_of[groups[row]]} and {step}); order samples by group and make --global-batch-size a "
                    "multiple of --n-samples-per-prompt"
                )


def _check_active_tokens(loss_masks: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]) -> None:
    for step, rows in enumerate(steps):
        if not any(any(loss_masks[row]) for row in rows):
            raise UserError(
                f"token_mean needs at least one active token in every optimizer step, and step {step} "
                f"({len(rows)} samples) has none; its samples are all masked"
            )


def _package_shard(data: dict[str, Any], partition: list[int], step_row_counts: list[int]) -> dict[str, Any]:
    """Take the partition's entries of every per-row column; copy the rest as it is."""
    num_rows = len(data["tokens"])
    shard: dict[str, Any] = {"partition": partition, "step_row_counts": step_row_counts}
    for key, column in data.items():
        per_row = isinstance(column, (list, tuple)) and len(column) == num_rows and key not in WHOLE_COLUMNS
        shard[key] = [column[row] for row in partition] if per_row else column
    return shard


def process_rollout_data_shard(args: Namespace, shard: dict[str, Any]) -> dict[str, Any]:
    """Finish a shard on the train side: drop "partition" and cut the `WHOLE_COLUMNS` to the shard's rows."""
    partition = shard.pop("partition")
    for key in WHOLE_COLUMNS:
        if key in shard:
            shard[key] = [shard[key][row] for row in partition]
    return shard


def validate_train_data(args: Namespace, data: dict[str, Any], *, dp_size: int) -> None:
    """Check what a trainer needs of a whole rollout before it computes anything.

    Args:
        args: Reads `global_batch_size`, the aggregation mode and, for the policy loss, the options that need the
            rollout's log-probs.
        data: Columns, from `convert_samples_to_train_data` or a custom conversion.
        dp_size: Number of data-parallel ranks.

    Raises:
        UserError: a needed column is missing, or a column holds what `check_columns` refuses; a row without a prompt
            token; a number of rollouts that does not divide into steps, or steps that do not divide over the ranks.
    """
    check_columns(data)
    _check_rollout_log_probs(args, data)
    num_rows = len(data["tokens"])
    for row, (tokens, response_length) in enumerate(zip(data["tokens"], data["response_lengths"], strict=True)):
        if len(tokens) <= response_length:
            raise UserError(
                f"sample {row} has {len(tokens)} tokens and a response_length of {response_length}; at least one "
                "prompt token has to come before the response, since a token is predicted from the one before it"
            )
    num_rollouts = sum(data["rollout_counts"]) if "rollout_counts" in data else num_rows
    if num_rollouts % args.global_batch_size:
        raise UserError(
            f"the rollout has {num_rollouts} samples, which is not a multiple of global_batch_size "
            f"{args.global_batch_size}; set --global-batch-size to a divisor of {num_rollouts} "
            "(or --rollout-batch-size and --n-samples-per-prompt to what the rollout holds)"
        )
    if LossAggregation.of(args) is not LossAggregation.PROMPT_MEAN and args.global_batch_size % dp_size:
        raise UserError(
            f"global_batch_size {args.global_batch_size} is not divisible by the {dp_size} data-parallel ranks; "
            "change --global-batch-size or the number of processes"
        )


def _check_rollout_log_probs(args: Namespace, data: dict[str, Any]) -> None:
    """Check that an option of the policy loss that needs the rollout's log-probs has them."""
    if getattr(args, "loss_type", "policy_loss") != "policy_loss" or "rollout_log_probs" in data:
        return
    needing = ["use_rollout_logprobs"]
    if getattr(args, "custom_tis_function_path", None) is None:
        needing += ["use_tis", "get_mismatch_metrics"]
    flags = ["--" + name.replace("_", "-") for name in needing if getattr(args, name, False)]
    if flags:
        raise UserError(
            f"{', '.join(flags)}: the policy loss then needs the rollout's log-probs, and the samples carry none; set "
            "Sample.rollout_log_probs on every sample (in a custom conversion the column rollout_log_probs), or leave "
            "the option out"
        )
