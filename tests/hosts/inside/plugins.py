"""Plug-ins that a user of the host may have: a rejecting importance-sampling function and a custom reducer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def reject_every_third(*, pg_loss: torch.Tensor, loss_masks: list[torch.Tensor], **ignored: Any) -> tuple:
    """Leave the loss, and take every third response token of each row out of the mask."""
    kept = [mask * (torch.arange(mask.numel()) % 3 != 1) for mask in loss_masks]
    return pg_loss, kept, {"rejected": torch.ones_like(pg_loss)}


def seventh(total_lengths: Any, response_lengths: Any, loss_masks: Any, per_token: bool) -> Callable:
    """A reducer like no mode: a seventh of the sum, masked or not."""
    return lambda values: values.sum() / 7
