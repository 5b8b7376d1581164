"""Per-token terms of the losses: pure functions of `[T]` tensors, no reduction, no rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles.backends.training_utils.loss_aggregation import Reducer, send, takes_stacks, taking_stacks

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats before exp, so that one token cannot overflow float32 (exp(20) is 4.9e8)."""

KL_LIMIT = 10.0
"""`low_var_kl` is clamped to +-10, as in the host."""


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate KL(pi || base) per sampled token.

    With r = log pi - log base: k1 = r; k2 = r^2 / 2; k3 = exp(-r) - 1 + r; low_var_kl is k3 with its exponent and its
    result clamped. `importance_ratio` (pi / pi_old) multiplies the estimate, which makes its gradient unbiased.

    Args:
        log_probs: `[T]` of pi, nats.
        log_probs_base: `[T]` of the base policy, nats.
        kl_loss_type: "k1", "k2", "k3" or "low_var_kl".
        importance_ratio: `[T]` or None.

    Returns:
        `[T]` float32, nats.

    Raises:
        ValueError: unknown `kl_loss_type`.

    Reference:
        J. Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = log_ratio
    elif kl_loss_type == "k2":
        kl = log_ratio.square() / 2
    elif kl_loss_type == "k3":
        kl = torch.exp(-log_ratio) - 1 + log_ratio
    elif kl_loss_type == "low_var_kl":
        log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = torch.exp(-log_ratio) - 1 + log_ratio
    else:
        raise ValueError(f"unknown kl_loss_type {kl_loss_type!r}; choose one of k1, k2, k3, low_var_kl")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-KL_LIMIT, KL_LIMIT) if kl_loss_type == "low_var_kl" else kl


def safe_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of a log-ratio clamped to +-`LOG_RATIO_LIMIT`; NaN stays NaN."""
    return log_ratio.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped surrogate per token and whether the clip was active.

    With ratio = exp(-ppo_kl): max(-ratio * A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A); with dual clip, for
    A < 0 the result is capped at -eps_clip_c * A.

    Args:
        ppo_kl: `[T]` log pi_old - log pi, nats.
        advantages: `[T]`.
        eps_clip: Lower clip range.
        eps_clip_high: Upper clip range (clip-higher of DAPO).
        eps_clip_c: Dual-clip constant, > 1, or None.

    Returns:
        `(pg_losses, clipfrac)`, both `[T]` float32; clipfrac is 1 where the clipped branch won.

    Raises:
        ValueError: `eps_clip_c` is not above 1.

    References:
        PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; DAPO, arXiv 2503.14476.
    """
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ValueError(f"eps_clip_c, the dual-clip constant, must be greater than 1, got {eps_clip_c}")
    ratio = safe_exp(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    pg_losses = torch.maximum(unclipped, clipped)
    clipfrac = (clipped > unclipped).float()
    if eps_clip_c is not None:
        pg_losses = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, pg_losses), pg_losses)
    return pg_losses, clipfrac


def split_like(values: torch.Tensor, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split `[T]` values into rows as long as `rows`; the inverse of `concat`."""
    return list(values.split([row.numel() for row in rows])) if rows else []


def repeat_over_tokens(row_values: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Repeat `[B]` row values over the tokens of `rows`, giving `[T]`."""
    lengths = [row.numel() for row in rows]
    repeats = send(lengths, row_values.device, dtype=torch.int64)
    return torch.repeat_interleave(row_values, repeats, output_size=sum(lengths))


def row_sums(values: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum `[T]` values over the tokens of each of `rows`, giving `[B]`; differentiable."""
    index = repeat_over_tokens(torch.arange(len(rows), device=values.device), rows)
    return sum_by(values, index, len(rows))


def sum_by(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Add up values `[B]` that have the same `[B]` int64 index, giving `[size]` of their dtype; differentiable."""
    return values.new_zeros(size).index_add(0, index, values)


def weighted_reducer(reducer: Reducer, weights: torch.Tensor) -> Reducer:
    """Return x -> reducer(w * x) of `[T]` weights; a token of weight 0 is out like a masked one, NaN included."""

    def weighted(values: torch.Tensor) -> torch.Tensor:
        return reducer(torch.where(weights != 0, values, values.new_zeros(())) * weights)

    return taking_stacks(weighted) if takes_stacks(reducer) else weighted
