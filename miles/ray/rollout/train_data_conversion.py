"""Samples -> train data (columns over all rows of a rollout) -> one shard for each data-parallel rank.

The path is the host's; nothing here needs Ray. Every rank may run it on the same samples and take its own shard, since
it is deterministic. Columns that the loss layer adds to the host's:

- `rollout_counts`, `prompt_counts`: 1 on the first row of each rollout (prompt group), else 0. Their sums over any set
  of rows that makes up a step are N and P, whatever the cut.
- `rollout_mask_sums`, `prompt_mask_sums`: on each row, the active tokens of its whole rollout (prompt group).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.ray.rollout.dp_split import (
    process_rollout_data_shard,
    split_train_data_by_dp,
    split_train_data_by_dp_raw,
    validate_train_data,
)
from miles.ray.rollout.rewards import RewardPostProcess, post_process_rewards
from miles.ray.rollout.row_ids import first_occurrences, name_of, rollout_ids_of
from miles.utils.errors import UserError
from miles.utils.types import Sample

__all__ = [
    "convert_samples_to_train_data",
    "process_rollout_data_shard",
    "split_train_data_by_dp",
    "split_train_data_by_dp_raw",
    "validate_train_data",
]


def convert_samples_to_train_data(
    args: Namespace,
    samples: Sequence[Sample],
    metadata: dict[str, Any],
    custom_convert_samples_to_train_data_func: Callable[..., dict[str, Any]] | None,
    custom_reward_post_process_func: RewardPostProcess | None,
) -> dict[str, Any]:
    """Turn the samples of one rollout step into columns, one entry per row.

    Args:
        args: Reads the aggregation mode, `n_samples_per_prompt` and the reward normalization.
        samples: Rows in stream order.
        metadata: Unused here; hosts pass run-level facts to their own conversions.
        custom_convert_samples_to_train_data_func: `(args, samples) -> columns`, replaces everything below.
        custom_reward_post_process_func: `(args, samples) -> (raw_rewards, rewards)`.

    Returns:
        The columns. `tokens`, `response_lengths`, `loss_masks`, `rewards` (normalized), `raw_reward`, `truncated`,
        `sample_indices`; `rollout_log_probs` where samples have them; `rollout_ids`, `rollout_counts` and
        `rollout_mask_sums` where a rollout has several rows; `prompt_group_indices`, `prompt_counts` and
        `prompt_mask_sums` under `prompt_mean`.

    Raises:
        UserError: what a sample holds cannot be trained on; the message names the sample.
    """
    if custom_convert_samples_to_train_data_func is not None:
        return custom_convert_samples_to_train_data_func(args, samples)
    if not samples:
        raise UserError("the rollout is empty; training needs at least one sample")
    loss_masks = [_checked_loss_mask(sample, position) for position, sample in enumerate(samples)]
    raw_rewards, rewards = post_process_rewards(args, samples, custom_reward_post_process_func)
    train_data: dict[str, Any] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": loss_masks,
    }
    for key in ("raw_reward", "round_number"):
        if all(key in (sample.metadata or ()) for sample in samples):
            train_data[key] = [sample.metadata[key] for sample in samples]
    if any(sample.train_metadata is not None for sample in samples):
        train_data["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.rollout_log_probs is not None for sample in samples):
        train_data["rollout_log_probs"] = [
            _checked_log_probs(sample, mask, position)
            for position, (sample, mask) in enumerate(zip(samples, loss_masks, strict=True))
        ]
    rollout_ids = rollout_ids_of(samples)
    if len(set(rollout_ids)) < len(samples):
        train_data |= _shared_columns("rollout", "rollout_ids", rollout_ids, loss_masks)
    if LossAggregation.of(args) is LossAggregation.PROMPT_MEAN:
        groups = _prompt_groups(args, samples)
        train_data |= _shared_columns("prompt", "prompt_group_indices", groups, loss_masks)
    return train_data


def _checked_loss_mask(sample: Sample, position: int) -> list[int]:
    """Return the row's mask as 0/1 integers, or say what is wrong with the row."""
    length = sample.response_length
    if length < 0 or len(sample.tokens) < length:
        raise UserError(
            f"{name_of(sample, position)} has {len(sample.tokens)} tokens, fewer than its response_length {length}; "
            "tokens must hold the prompt followed by the response"
        )
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    if len(mask) != length:
        raise UserError(
            f"{name_of(sample, position)} has a loss_mask of length {len(mask)} for a response_length of {length}; "
            "a mask needs exactly one entry for each response token"
        )
    for index, value in enumerate(mask):
        if value not in (0, 1):
            raise UserError(
                f"{name_of(sample, position)} has loss_mask[{index}] = {value!r}; "
                "a mask holds 0 (masked) and 1 (active)"
            )
    return [0] * length if sample.remove_sample else [int(value) for value in mask]


def _checked_log_probs(sample: Sample, mask: list[int], position: int) -> list[float]:
    """Return the row's rollout log-probs, finite wherever the mask is set."""
    log_probs = sample.rollout_log_probs
    if log_probs is None or len(log_probs) != sample.response_length:
        got = "none" if log_probs is None else f"{len(log_probs)}"
        raise UserError(
            f"{name_of(sample, position)} has {got} rollout_log_probs for a response_length of "
            f"{sample.response_length}; give one for each response token on every sample of the rollout, or on none"
        )
    for index, (value, active) in enumerate(zip(log_probs, mask, strict=True)):
        if active and not math.isfinite(value):
            raise UserError(
                f"{name_of(sample, position)} has rollout_log_probs[{index}] = {value} at an active token; "
                "log-probs must be finite wherever the mask is 1"
            )
    return list(log_probs)


def _shared_columns(
    kind: str, ids_column: str, ids: Sequence[Hashable], loss_masks: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the columns of rows that share a divisor: their id, who counts, and the total of the sharers' masks."""
    totals: dict[Hashable, int] = {}
    for id_, mask in zip(ids, loss_masks, strict=True):
        totals[id_] = totals.get(id_, 0) + sum(mask)
    return {
        ids_column: list(ids),
        f"{kind}_counts": first_occurrences(ids),
        f"{kind}_mask_sums": [totals[id_] for id_ in ids],
    }


def _prompt_groups(args: Namespace, samples: Sequence[Sample]) -> list[int]:
    """Return each row's group, after checking that groups are what the configuration promises."""
    groups = [sample.group_index for sample in samples]
    if None in groups:
        position = groups.index(None)
        raise UserError(
            f"prompt_mean needs a group_index on every sample, and {name_of(samples[position], position)} has none; "
            "set Sample.group_index to the prompt that the sample answers"
        )
    if getattr(args, "prompt_groups", "complete") == "complete":
        members: dict[int, set[Hashable]] = {}
        for group, rollout in zip(groups, rollout_ids_of(samples), strict=True):
            members.setdefault(group, set()).add(rollout)
        wrong = {
            group: len(rollouts) for group, rollouts in members.items() if len(rollouts) != args.n_samples_per_prompt
        }
        if wrong:
            group, size = next(iter(wrong.items()))
            raise UserError(
                f"prompt_mean needs complete prompt groups of n_samples_per_prompt={args.n_samples_per_prompt} "
                f"samples; {len(wrong)} of {len(members)} groups are not, for example group_index {group} with "
                f"{size}; "
                "set --n-samples-per-prompt to the rollout's group size, or pass --prompt-groups ragged"
            )
    return groups
