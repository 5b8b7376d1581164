"""Advantages of the critic-free estimators, from rewards that conversion has already centred per prompt group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles.backends.training_utils.loss_aggregation import concat
from miles.backends.training_utils.loss_hub.math_utils import repeat_over_tokens, split_like
from miles.backends.training_utils.parallel import get_parallel_state

ESTIMATORS = ("grpo", "gspo", "reinforce_plus_plus_baseline")
"""All three give every token of a response its row's reward; they differ in how rewards are normalised before
(conversion), in whether advantages are whitened after, and, for GSPO, in the ratio of the policy loss."""


def compute_advantages(
    advantage_estimator: str, rewards: torch.Tensor, local_masks: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return A_it = reward_i on each of the row's tokens.

    Args:
        advantage_estimator: One of `ESTIMATORS`.
        rewards: `[B]` float32, normalised per prompt group.
        local_masks: B masks `[T_i]`; only their lengths and device matter.

    Returns:
        B rows `[T_i]` float32.

    Raises:
        ValueError: unknown estimator.

    References:
        GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071; REINFORCE++ with baseline, arXiv 2501.03262.
    """
    if advantage_estimator not in ESTIMATORS:
        raise ValueError(f"unknown advantage_estimator {advantage_estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    return split_like(repeat_over_tokens(rewards, local_masks), local_masks)


def normalize_advantages(advantages: list[torch.Tensor], local_masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Whiten over the active tokens of all data- and context-parallel ranks: (A - mean) / sqrt(var + 1e-8).

    Sums are float64, in one collective; the variance is the unbiased one (0 for fewer than two tokens).

    Args:
        advantages: B rows `[T_i]`.
        local_masks: B masks `[T_i]`.

    Returns:
        B rows `[T_i]` float32.
    """
    values, active = concat(advantages), concat(local_masks) != 0
    kept = values[active].to(torch.float64)
    totals = torch.stack([kept.sum(), kept.square().sum(), active.sum().to(torch.float64)])
    total, squares, count = get_parallel_state().intra_dp_cp.all_reduce(totals).unbind()
    mean = total / count.clamp_min(1)
    variance = (squares - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)
    return split_like(((values - mean) * torch.rsqrt(variance + 1e-8)).float(), advantages)
