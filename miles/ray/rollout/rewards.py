"""Raw rewards -> the rewards that advantages are made of: centred, and perhaps scaled, inside each prompt group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from miles.ray.rollout.row_checks import finite_number
from miles.ray.rollout.row_groups import dense_indices, name_of, rollout_ids_of, rows_by_id
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import Sample

RewardPostProcess = Callable[[Options, Sequence[Sample]], tuple[list[float], list[float]]]


def post_process_rewards(
    args: Options,
    samples: Sequence[Sample],
    custom_reward_post_process_func: RewardPostProcess | None,
) -> tuple[list[float], list[float]]:
    """Return raw rewards and the rewards that advantages are made of.

    Raises:
        UserError: rows of one rollout differ in their reward; or a reward, raw or processed, is no finite number or
            larger than float32 holds (which also keeps the group normalization, in float64, from overflowing). The
            message names the sample.
    """
    if custom_reward_post_process_func is not None:
        return _checked_pair(custom_reward_post_process_func(args, samples), samples)
    raw_rewards = [_checked_reward(args, sample, position) for position, sample in enumerate(samples)]
    for rollout, rows in rows_by_id(rollout_ids_of(samples)).items():
        _check_shared_reward(rollout, raw_rewards, rows)
    if not args.rewards_normalization or args.loss_type == "sft_loss":
        return raw_rewards, raw_rewards
    return raw_rewards, _normalize_by_group(args, samples, raw_rewards)


def _checked_reward(args: Options, sample: Sample, position: int) -> float:
    try:
        reward = sample.get_reward_value(args)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{name_of(sample, position)} has no reward {args.reward_key!r} in {sample.reward!r}"
        ) from error
    hint = "; choose one of several named rewards with --reward-key" if isinstance(reward, Mapping) else ""
    return finite_number(reward, f"{name_of(sample, position)} has reward", hint=hint)


def _checked_pair(result: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return what a custom post-processing made, as two lists of one finite number for each sample."""
    hook = "--custom-reward-post-process-path must return (raw_rewards, rewards), one number for each sample"
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not all(_is_list_like(part) for part in result):
        raise UserError(f"{hook}; got {type(result).__name__}")
    if any(len(part) != len(samples) for part in result):
        raise UserError(f"{hook}; got {len(result[0])} and {len(result[1])} for {len(samples)} samples")
    raw_rewards, rewards = (
        [
            finite_number(value, f"{name_of(sample, position)} got from the custom post-processing the reward")
            for position, (sample, value) in enumerate(zip(samples, part, strict=True))
        ]
        for part in result
    )
    return raw_rewards, rewards


def _is_list_like(part: Any) -> bool:
    return hasattr(part, "__len__") and not isinstance(part, (Mapping, Set)) and getattr(part, "ndim", 1) == 1


def _normalize_by_group(args: Options, samples: Sequence[Sample], raw_rewards: Sequence[float]) -> list[float]:
    """Subtract each prompt group's mean over rollouts and, for GRPO and GSPO, divide by its standard deviation.

    Rows of one rollout share its reward and count once. Rollouts without a `group_index` are grouped by their place,
    `n_samples_per_prompt` at a time, as in the host's legacy batches.
    """
    by_place = any(sample.group_index is None for sample in samples)
    rollouts = rollout_ids_of(samples)
    groups: dict[int | None, dict[Hashable, list[int]]] = {}
    for row, (sample, rollout, place) in enumerate(zip(samples, rollouts, dense_indices(rollouts), strict=True)):
        group = place // args.n_samples_per_prompt if by_place else sample.group_index
        groups.setdefault(group, {}).setdefault(rollout, []).append(row)
    use_std = args.advantage_estimator in ("grpo", "gspo") and args.grpo_std_normalization
    normalized = [0.0] * len(samples)
    for members in groups.values():
        rewards = np.array([raw_rewards[rows[0]] for rows in members.values()], dtype=np.float64)
        # The mean of equal rewards may be off by rounding; the standard deviation would make a signal of that.
        centred = (rewards - rewards.mean()) * (rewards != rewards[0]).any()
        if use_std and len(rewards) > 1:
            centred = centred / (rewards.std(ddof=1) + 1e-6)
        for rows, value in zip(members.values(), centred.tolist(), strict=True):
            for row in rows:
                name = f"{name_of(samples[row], row)} got from the normalization of its group the reward"
                normalized[row] = finite_number(value, name)
    return normalized


def _check_shared_reward(rollout: Hashable, raw_rewards: Sequence[float], rows: Sequence[int]) -> None:
    rewards = {raw_rewards[row] for row in rows}
    if len(rewards) > 1:
        raise UserError(
            f"samples {rows} are rows of one rollout, rollout_id {rollout}, and must share one reward; got "
            f"{sorted(rewards)}"
        )
