"""Sums, shares and medians of weights, each a small function of tensors.

Shapes: N samples, C cells (quarters, prompts) that they fall into.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divide(numerator: float | Tensor, denominator: float | Tensor) -> float | None:
    """Return the quotient; None where there is nothing to divide by."""
    return float(numerator) / float(denominator) if denominator else None


def token_range(token_weights: Tensor, num_active: Tensor) -> dict[str, float | None]:
    """Return the smallest, median and largest weight over all active tokens; a sample's tokens weigh alike.

    Args:
        token_weights: [N] float64; NaN where there is none, as without an active token.
        num_active: [N] int64 active tokens.

    Returns:
        "min", "median" (of an even number of tokens the mean of the two in the middle) and "max"; None without tokens.
    """
    is_known = ~token_weights.isnan()
    values, order = token_weights[is_known].sort()
    if not len(values):
        return dict.fromkeys(("min", "median", "max"))
    ends = num_active[is_known][order].cumsum(0)
    total = int(ends[-1])
    middle = torch.tensor([(total + 1) // 2, total // 2 + 1])  # counted from 1
    median = values[torch.searchsorted(ends, middle)].mean()
    return {"min": values[0].item(), "median": median.item(), "max": values[-1].item()}


def right_answers(rewards: Tensor, above: float | None) -> tuple[Tensor, str]:
    """Return which samples are right, and the rule in words.

    Args:
        rewards: [N] float64 raw rewards.
        above: A threshold of the person's own. None: of two different rewards in the data the larger is right; of any
            other number of them, those above 0.

    Returns:
        [N] bool, and the rule.
    """
    distinct = rewards.unique()
    if above is not None:
        return rewards > above, f"reward above {above:g}"
    if len(distinct) == 2:
        low, high = distinct.tolist()
        return rewards == high, f"reward {high:g}; wrong: {low:g}"
    return rewards > 0, "reward above 0"


def group_sizes(prompts: Tensor) -> Tensor:
    """Return [P] int64 samples of each prompt group, from the [N] int64 group of each sample."""
    return torch.bincount(prompts)


def has_one_reward(prompts: Tensor, rewards: Tensor) -> Tensor:
    """Return [P] bool, whether the samples of a prompt group all have the same reward.

    Args:
        prompts: [N] int64 prompt group of each sample.
        rewards: [N] float64.
    """
    num_prompts = int(prompts.max()) + 1
    ends = rewards.new_zeros(num_prompts), rewards.new_zeros(num_prompts)
    low, high = (
        end.scatter_reduce(0, prompts, rewards, reduce=reduce, include_self=False)
        for end, reduce in zip(ends, ("amin", "amax"), strict=True)
    )
    return low == high
