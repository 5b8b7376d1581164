"""Samples -> train data (columns over all rows of a rollout) -> one shard for each data-parallel rank.

The path is the host's; nothing here needs Ray. Every rank may run it on the same samples and take its own shard, since
it is deterministic. Columns that the loss layer adds to the host's:

- `rollout_counts`, `prompt_counts`: 1 on the first row of each rollout (prompt group), else 0. Their sums over any set
  of rows that makes up a step are N and P, whatever the split.
- `rollout_mask_sums`, `prompt_mask_sums`: on each row, the active tokens of its whole rollout (prompt group).
- `loss_weights`: on each row, the weight of each response token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.ray.rollout.column_checks import validate_train_data
from miles.ray.rollout.dp_split import (
    process_rollout_data_shard,
    split_train_data_by_dp,
    split_train_data_by_dp_raw,
)
from miles.ray.rollout.rewards import RewardPostProcess, post_process_rewards
from miles.ray.rollout.row_checks import (
    check_id,
    check_tokens,
    checked_log_probs,
    checked_loss_mask,
    checked_loss_weights,
    finite_number,
    short,
)
from miles.ray.rollout.row_groups import (
    check_complete_groups,
    check_one_group_each,
    name_of,
    rollout_ids_of,
    shared_columns,
)
from miles.utils.errors import UserError
from miles.utils.misc import wants_context
from miles.utils.options import Options
from miles.utils.types import Sample

__all__ = [
    "check_groups",
    "convert_samples_to_train_data",
    "process_rollout_data_shard",
    "split_train_data_by_dp",
    "split_train_data_by_dp_raw",
    "validate_train_data",
]


def convert_samples_to_train_data(
    args: Options,
    samples: Sequence[Sample],
    metadata: dict[str, Any],
    custom_convert_samples_to_train_data_func: Callable[..., dict[str, Any]] | None,
    custom_reward_post_process_func: RewardPostProcess | None,
) -> dict[str, Any]:
    """Turn the samples of one rollout step into columns, one entry per row.

    Args:
        args: Reads the aggregation mode, `prompt_groups`, `n_samples_per_prompt`, the reward normalization and, of a
            custom reducer, whether it wants the step's context.
        samples: Rows in stream order.
        metadata: Unused here; hosts pass run-level facts to their own conversions.
        custom_convert_samples_to_train_data_func: `(args, samples) -> columns`, replaces everything below.
        custom_reward_post_process_func: `(args, samples) -> (raw_rewards, rewards)`.

    Returns:
        The columns. `tokens`, `response_lengths`, `loss_masks`, `rewards` (normalized), `raw_reward`, `truncated`,
        `sample_indices`; `rollout_log_probs` where samples have them; `loss_weights` where a sample has them (ones
        for the others); `rollout_ids`, `rollout_counts` and `rollout_mask_sums` where a rollout has several rows;
        `prompt_group_indices`, `prompt_counts` and `prompt_mask_sums` under `prompt_mean` and, where every sample has
        a group, with ragged groups and for a custom reducer that wants the step's context; otherwise, where every
        sample has one, `sample_group_indices`, for the log alone.

    Raises:
        UserError: what a sample holds cannot be trained on; the message names the sample. What a custom conversion
            returns is left to `validate_train_data`.
    """
    args = Options.of(args)
    if custom_convert_samples_to_train_data_func is not None:
        return custom_convert_samples_to_train_data_func(args, samples)
    if not samples:
        raise UserError("the rollout is empty; training needs at least one sample")
    loss_masks = [_checked_loss_mask(sample, position) for position, sample in enumerate(samples)]
    check_one_group_each(rollout_ids_of(samples), [sample.group_index for sample in samples])
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
            train_data[key] = _numbers_in_metadata(key, samples)
    if any(sample.train_metadata is not None for sample in samples):
        train_data["metadata"] = [sample.train_metadata for sample in samples]
    return train_data | _token_columns(samples, loss_masks) | _id_columns(args, samples, loss_masks)


def _token_columns(samples: Sequence[Sample], loss_masks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the per-token columns that only some rollouts have."""
    columns: dict[str, Any] = {}
    if any(sample.rollout_log_probs is not None for sample in samples):
        columns["rollout_log_probs"] = [
            checked_log_probs(name_of(sample, position), sample.rollout_log_probs, mask)
            for position, (sample, mask) in enumerate(zip(samples, loss_masks, strict=True))
        ]
    if any(sample.loss_weights is not None for sample in samples):
        columns["loss_weights"] = [_checked_loss_weights(sample, position) for position, sample in enumerate(samples)]
    return columns


def _id_columns(args: Options, samples: Sequence[Sample], loss_masks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the columns of rollouts and prompt groups that the configuration needs."""
    columns: dict[str, Any] = {}
    rollout_ids = rollout_ids_of(samples)
    if len(set(rollout_ids)) < len(samples):
        columns |= shared_columns("rollout", rollout_ids, loss_masks)
    groups = [sample.group_index for sample in samples]
    is_prompt_mean = LossAggregation.of(args).needs_prompt_groups
    check_groups(args, samples)
    looks_at_groups = wants_context(args) or args.prompt_groups == "ragged"
    if is_prompt_mean or (looks_at_groups and None not in groups):
        columns |= shared_columns("prompt", groups, loss_masks)
    elif None not in groups:
        columns["sample_group_indices"] = groups
    return columns


def _checked_loss_mask(sample: Sample, position: int) -> list[int]:
    """Return the row's mask as 0/1 integers, or say what is wrong with the row."""
    name = name_of(sample, position)
    for field in ("group_index", "rollout_id"):
        check_id(name, field, getattr(sample, field))
    if not isinstance(sample.metadata, (Mapping, type(None))):
        raise UserError(f"{name} has metadata of type {type(sample.metadata).__name__}; it must be a dict or None")
    if getattr(sample.remove_sample, "ndim", 0):
        raise UserError(f"{name} has remove_sample {short(sample.remove_sample)}; it must be True or False")
    length = sample.response_length
    check_tokens(name, sample.tokens, length)
    mask = [1] * length if sample.loss_mask is None else checked_loss_mask(name, sample.loss_mask, length)
    return [0] * length if sample.remove_sample else mask


def _checked_loss_weights(sample: Sample, position: int) -> list[float]:
    if sample.loss_weights is None:
        return [1.0] * sample.response_length
    return checked_loss_weights(name_of(sample, position), sample.loss_weights, sample.response_length)


def _numbers_in_metadata(key: str, samples: Sequence[Sample]) -> list[float]:
    return [
        finite_number(sample.metadata[key], f"{name_of(sample, position)} has metadata[{key!r}]")
        for position, sample in enumerate(samples)
    ]


def check_groups(args: Options, samples: Sequence[Sample]) -> None:
    """Check that prompt groups are what `prompt_mean` needs and the configuration promises.

    Args:
        args: Reads the aggregation mode, `prompt_groups` and `n_samples_per_prompt`.
        samples: Rows in stream order.

    Raises:
        UserError: under `prompt_mean`, a sample without a group or, with complete groups, one of another size.
    """
    if not LossAggregation.of(args).needs_prompt_groups:
        return
    groups = [sample.group_index for sample in samples]
    if None in groups:
        position = groups.index(None)
        raise UserError(
            f"prompt_mean needs a group_index on every sample, and {name_of(samples[position], position)} has none; "
            "set Sample.group_index to the prompt that the sample answers"
        )
    if args.prompt_groups == "complete":
        check_complete_groups(groups, rollout_ids_of(samples), args.n_samples_per_prompt)
