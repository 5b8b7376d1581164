"""What an off-policy correction makes of one row, in float64, straight from its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.testing.step import CustomCorrection, Row
from miles.utils.options import Options


@dataclass(frozen=True)
class Corrected:
    """A corrected row of T tokens.

    Attributes:
        factors: What each token's policy loss is multiplied by, float64 `[T]`.
        kept: T entries 0 and 1: the active tokens that the correction left.
        metrics: Per-token metrics by name, float64 `[T]`.
    """

    factors: Tensor
    kept: Sequence[int]
    metrics: Mapping[str, Tensor]


def correct_row(args: Options, correction: CustomCorrection | None, row: Row, trained: Tensor) -> Corrected:
    """Apply the correction that the options ask for.

    Args:
        args: Reads `use_tis`, `get_mismatch_metrics`, `tis_type`, `tis_clip`, `tis_clip_low`.
        correction: The custom one, if any.
        row: The row.
        trained: Its log-probs under the training engine before the step, float64 `[T]`.
    """
    untouched = Corrected(torch.ones_like(trained), row.mask, {})
    if not (args.use_tis or args.get_mismatch_metrics):
        return untouched
    rollout = row.rollout_log_probs
    log_ratio = None if rollout is None else trained - torch.tensor(rollout, dtype=torch.float64)
    if correction is not None:
        factors, kept, metrics = correction.definition(args, row, log_ratio)
        return Corrected(factors, [k * bit for k, bit in zip(kept, row.mask, strict=True)], metrics)
    if log_ratio is None:
        raise ValueError("a built-in correction needs rollout_log_probs on every row of the step")
    built_in: dict[str, Callable[[Options, Row, Tensor], Corrected]] = {
        "truncated": _truncate,
        "icepop": _reject_tokens,
        "geometric_rejection": _reject_row,
    }
    corrected = built_in[args.tis_type](args, row, log_ratio)
    return corrected if args.use_tis else replace(untouched, metrics=corrected.metrics)


def _truncate(args: Options, row: Row, log_ratio: Tensor) -> Corrected:
    ratio = log_ratio.exp()
    factors = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return Corrected(factors, row.mask, _metrics(ratio, factors != ratio))


def _reject_tokens(args: Options, row: Row, log_ratio: Tensor) -> Corrected:
    """Reject every token whose ratio lies outside; the others weigh it."""
    ratio = log_ratio.exp()
    inside = [args.tis_clip_low <= r <= args.tis_clip for r in ratio.tolist()]
    kept = [int(bit and here) for bit, here in zip(row.mask, inside, strict=True)]
    return Corrected(ratio, kept, _metrics(ratio, ~torch.tensor(inside)))


def _reject_row(args: Options, row: Row, log_ratio: Tensor) -> Corrected:
    """Reject the row if the geometric mean of its ratios lies outside; the tokens of others weigh 1."""
    active = [x for x, bit in zip(log_ratio.tolist(), row.mask, strict=True) if bit]
    mean = math.exp(sum(active) / max(len(active), 1))
    is_inside = args.tis_clip_low <= mean <= args.tis_clip
    kept = [int(bit and is_inside) for bit in row.mask]
    ratio = torch.full_like(log_ratio, mean)
    return Corrected(torch.ones_like(ratio), kept, _metrics(ratio, torch.full_like(ratio, not is_inside)))


def _metrics(ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    return {"tis": ratio, "tis_abs": (ratio - 1).abs(), "tis_clipfrac": clipped.double()}
