"""Importance-sampling corrections for the gap between the policy that sampled and the policy that trains.

A correction is called with keywords and returns `(pg_loss, loss_masks, metrics)`: the corrected per-token loss `[T]`,
the masks that the policy term uses from now on (B whole-response masks), and per-token metrics `[T]`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from miles.backends.training_utils.loss_aggregation import concat
from miles.backends.training_utils.loss_hub.math_utils import safe_exp
from miles.utils.errors import UserError
from miles.utils.types import RolloutBatch

Correction = tuple[torch.Tensor, Sequence[torch.Tensor], dict[str, torch.Tensor]]


def _correct(
    pg_loss: torch.Tensor, ratio: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    metrics = {"tis": ratio, "tis_clipfrac": (weights != ratio).float(), "tis_abs": (ratio - 1).abs()}
    return pg_loss * weights, metrics


def _ratio(train_log_probs: Sequence[torch.Tensor], rollout_log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    return safe_exp(concat(train_log_probs) - concat(rollout_log_probs)).detach()


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """Truncated importance sampling: pg_loss * clamp(pi_train / pi_rollout, tis_clip_low, tis_clip).

    Args:
        args: Reads `tis_clip` and `tis_clip_low`.
        pg_loss: `[T]` per-token loss.
        train_log_probs: B rows `[T_i]` under the training engine's old policy, nats.
        rollout_log_probs: B rows `[T_i]` under the engine that sampled, nats.
        loss_masks: B whole-response masks; returned as they are.
        **kwargs: What other corrections need (`total_lengths`, `response_lengths`, ...).

    Returns:
        The corrected loss, the same masks, and "tis" (the ratio before truncation), "tis_clipfrac", "tis_abs".

    Reference:
        F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    pg_loss, metrics = _correct(pg_loss, ratio, ratio.clamp(args.tis_clip_low, args.tis_clip))
    return pg_loss, loss_masks, metrics


def icepop_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """Clip-or-pop: a token whose ratio lies outside [tis_clip_low, tis_clip] weighs 0, the others weigh their ratio.

    Popped tokens stay in every count. Arguments and results are those of `vanilla_tis_function`.

    Reference:
        Ling Team, "Every Step Evolves" (IcePop), arXiv 2510.18855.
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    pg_loss, metrics = _correct(pg_loss, ratio, torch.where(inside, ratio, 0.0))
    return pg_loss, loss_masks, metrics


def check_correction(path: str, result: Any, batch: RolloutBatch, pg_loss: torch.Tensor) -> Correction:
    """Return what a custom correction returned, after holding it to its contract.

    Args:
        path: The function's path, for messages.
        result: What it returned.
        batch: The micro-batch that it was called for.
        pg_loss: The per-token loss that it was given, `[T]`.

    Raises:
        UserError: it is not `(pg_loss, loss_masks, metrics)` of the right shapes, or a mask holds other than 0 and 1.
    """
    wanted = f"{path} must return (pg_loss, loss_masks, metrics)"
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
        raise UserError(f"{wanted}; got {type(result).__name__}")
    corrected, masks, metrics = result
    for name, value in {"pg_loss": corrected, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.shape != pg_loss.shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"{wanted} with {name} of shape {tuple(pg_loss.shape)}, a value for each token; got {got}")
    shapes = [mask.shape for mask in batch["loss_masks"]]
    if not isinstance(masks, (list, tuple)) or [getattr(mask, "shape", None) for mask in masks] != shapes:
        raise UserError(f"{wanted} with one mask for each of {len(shapes)} rows, over its whole response")
    kept = concat(masks)
    if not ((kept == 0) | (kept == 1)).all():
        raise UserError(f"{wanted} with masks that hold 0 (rejected) and 1 (kept) only")
    return corrected, masks, metrics
