"""Metrics: add them up over micro-batches and ranks, divide each by its own normalizer, log.

A metric is a pair of a sum and a count until the last moment; pairs add up over any split, means do not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.data import DataIterator
from miles.backends.training_utils.loss_aggregation import concat
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

ROLLOUT_METRICS = ("rewards", "raw_reward")
"""Columns of the rollout log with one number per rollout, on each of its rows; logged as means over rollouts."""

ROW_METRICS = ("response_lengths", "total_lengths", "truncated", "round_number")
"""Columns of the rollout log with one number per row; logged as means over rows."""

TOKEN_METRICS = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns", "values", "entropy")
"""Columns of the rollout log with one value per response token; logged as means over rollouts of token means."""

OTHER_STEP_KEYS = ("step", "skipped_steps")
"""What the log of a step has under "train/" from elsewhere: its number, and how many were skipped."""


def aggregate_train_losses(losses_reduced: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of one optimizer step from the log dictionaries of this rank's micro-batches.

    metric = cp_size * sum(values) / sum(normalizers), sums over micro-batches and over DP x CP ranks. The factor
    cp_size is there because each context-parallel rank holds a share of the values but counts whole responses.
    A collective: every DP x CP rank calls it with the same keys.

    Args:
        losses_reduced: `{"keys", "values"}` with the shared count first in `values`, or `{"keys", "values",
            "normalizers"}` with a count for each key; all of one form.

    Returns:
        Metric by key; empty without log dictionaries.

    Raises:
        ValueError: the dictionaries mix the two forms, differ in keys or their order, have the wrong number of values
            or normalizers, or a normalizer that is not positive over the whole step.
    """
    if not losses_reduced:
        return {}
    keys = list(losses_reduced[0]["keys"])
    pairs = [_sums_and_normalizers(log_dict, keys, "normalizers" in losses_reduced[0]) for log_dict in losses_reduced]
    state = get_parallel_state()
    # One vector for both: float64 holds counts up to 2^53 exactly.
    local = torch.stack([torch.stack([values, counts.to(values)]) for values, counts in pairs]).sum(0)
    sums, normalizers = state.intra_dp_cp.all_reduce(local).tolist()
    for key, normalizer in zip(keys, normalizers, strict=True):
        if not normalizer > 0:
            raise ValueError(f"the normalizer of metric {key!r} must be positive over the step, got {normalizer}")
    return {
        key: value * state.cp.size / normalizer for key, value, normalizer in zip(keys, sums, normalizers, strict=True)
    }


def _sums_and_normalizers(
    log_dict: dict[str, Any], keys: list[str], has_normalizers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one micro-batch's `[K]` sums (float64) and `[K]` normalizers (int64 where they are integers)."""
    if ("normalizers" in log_dict) != has_normalizers:
        raise ValueError(
            "log dictionaries mix the legacy form with the form that carries normalizers; use one of them"
        )
    if list(log_dict["keys"]) != keys:
        raise ValueError(f"log dictionaries differ in keys or their order: {keys} and {list(log_dict['keys'])}")
    values = log_dict["values"]
    expected = len(keys) if has_normalizers else len(keys) + 1
    if values.numel() != expected:
        raise ValueError(f"expected {expected} values for {len(keys)} keys, got {values.numel()}")
    values = values.detach().to(torch.float64)
    if not has_normalizers:
        return values[1:], values[:1].round().to(torch.int64).expand(len(keys))
    normalizers = log_dict["normalizers"]
    if normalizers.numel() != len(keys):
        raise ValueError(f"expected {len(keys)} normalizers for {len(keys)} keys, got {normalizers.numel()}")
    return values, normalizers.to(torch.float64 if normalizers.is_floating_point() else torch.int64)


def log_rollout_data(rollout_id: int, args: Options, rollout_data: RolloutBatch) -> dict[str, float]:
    """Return (and log on the first rank) the means of the rollout's columns over all ranks.

    Only the columns named above are metrics; whatever else travels with the rows is left alone. Where a rollout is
    stored as several rows, it counts once in the means over rollouts: its reward is its first row's, its token mean
    that over all of its rows. Where the rows are the rollouts, means over rollouts and over rows are the same. A
    collective over DP x CP: every rank calls it with the same columns.

    Args:
        rollout_id: Number of the rollout.
        args: Reads `qkv_format`.
        rollout_data: The rank's rows; reads "rollout_counts" and "rollout_mask_sums" where present.

    Returns:
        "rollout/<column>" to mean, on every rank.
    """
    state = get_parallel_state()
    num_rows = len(rollout_data["response_lengths"])
    rollout_counts = torch.as_tensor(rollout_data.get("rollout_counts", [1] * num_rows)).cpu()
    names, pairs = [], []
    for key in (*ROLLOUT_METRICS, *ROW_METRICS, *TOKEN_METRICS):
        column = rollout_data.get(key)
        if column is None:
            continue
        total: Any
        count: Any
        if key in TOKEN_METRICS:
            total, count = _sample_mean_sum(args, rollout_data, column) * state.cp.size, rollout_counts.sum()
        elif key in ROLLOUT_METRICS:
            total = torch.dot(torch.as_tensor(column, dtype=torch.float64).cpu(), rollout_counts.double())
            count = rollout_counts.sum()
        else:
            total, count = sum(column), num_rows
        names.append(key)
        pairs.append(torch.stack([torch.as_tensor(value, dtype=torch.float64).cpu() for value in (total, count)]))
    totals = state.intra_dp_cp.all_reduce(torch.stack(pairs)).tolist()
    metrics = {f"rollout/{name}": total / count for name, (total, count) in zip(names, totals, strict=True) if count}
    if state.intra_dp_cp.rank == 0:
        logger.debug("rollout %d: %s", rollout_id, metrics)
    return metrics


def _sample_mean_sum(args: Options, rollout_data: RolloutBatch, column: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over rollouts of token means, this rank's rows and context-parallel share of it."""
    reducer = get_sum_of_sample_mean(
        rollout_data["total_lengths"],
        rollout_data["response_lengths"],
        rollout_data["loss_masks"],
        qkv_format=args.qkv_format,
        max_seq_lens=rollout_data.get("max_seq_lens"),
        sample_denoms=rollout_data.get("rollout_mask_sums"),
    )
    return reducer(concat(column).detach())


def aggregate_forward_results(
    forward_data_store: Sequence[dict[str, list[torch.Tensor]]],
    data_iterator: DataIterator,
    args: Options,
    store_prefix: str = "",
) -> dict[str, list[torch.Tensor]]:
    """Put per-row results of forward-only micro-batches back into the rank's row order.

    Args:
        forward_data_store: For each micro-batch in schedule order, columns with one entry per row of it.
        data_iterator: The iterator that the micro-batches came from.
        args: Unused; the host's signature.
        store_prefix: Put before each column's name ("ref_", say).
    """
    schedule = data_iterator.micro_batch_indices
    order = [row for rows in schedule for row in rows]
    keys = forward_data_store[0].keys() if forward_data_store else ()
    results: dict[str, list[Any]] = {}
    for key in keys:
        # A micro-batch without rows has the result of the blank row that stood in for them.
        values = [
            value
            for rows, store in zip(schedule, forward_data_store, strict=True)
            for value in store[key][: len(rows)]
        ]
        rows: list[Any] = [None] * len(order)
        for row, value in zip(order, values, strict=True):
            rows[row] = value
        results[store_prefix + key] = rows
    return results


def log_train_step(
    args: Options,
    loss_dict: dict[str, float],
    grad_norm: float,
    rollout_id: int,
    step_id: int,
    num_steps_per_rollout: int,
    role: str = "actor",
    extra_metrics: dict[str, float] | None = None,
) -> dict[str, float]:
    """Return (and log on the first rank) one optimizer step's metrics under the host's names.

    Args:
        args: Unused; the host's signature.
        loss_dict: From `aggregate_train_losses`.
        grad_norm: Global L2 norm of the gradient before clipping.
        rollout_id: Number of the rollout.
        step_id: Number of the step in the rollout.
        num_steps_per_rollout: Steps in each rollout.
        role: "actor", or a name that goes before each key.
        extra_metrics: More of the step (learning rate, ...).

    Returns:
        "train/<key>" to value, "train/grad_norm" and "train/step".

    Raises:
        UserError: a metric of the loss has the name of one of the step; on every rank, since all have the same.
    """
    prefix = "train/" if role == "actor" else f"train/{role}-"
    of_step = {"grad_norm": grad_norm, **(extra_metrics or {})}
    taken = sorted(loss_dict.keys() & {*of_step, *OTHER_STEP_KEYS})
    if taken:
        raise UserError(
            f"the loss, or its correction, returned the metric {', '.join(taken)}, which every step logs itself; "
            "give it another name"
        )
    metrics = {prefix + key: value for key, value in (loss_dict | of_step).items()}
    metrics["train/step"] = rollout_id * num_steps_per_rollout + step_id
    if get_parallel_state().intra_dp_cp.rank == 0:
        logger.debug("step %d: %s", metrics["train/step"], metrics)
    return metrics
