"""Plug-ins of the changed steps, each as the package calls it, over micro-batches, and as a formula of one row."""

import math

import torch

from miles.backends.training_utils.cp_utils import get_local_response_loss_masks
from miles.testing import CustomCorrection, CustomReducer

UNLIKELY = -2.4
"""Log-probability below which `keep_likely` rejects a token."""


def keep_likely(*, pg_loss, train_log_probs, rollout_log_probs, local_masks):
    """Reject unlikely tokens, and weigh the others by their probability; for rollouts without log-probs."""
    assert rollout_log_probs is None
    masks = [mask * (row >= UNLIKELY) for mask, row in zip(local_masks, train_log_probs, strict=True)]
    likelihood = torch.cat(train_log_probs).exp()
    return pg_loss * likelihood, masks, {"likelihood": likelihood}


def _keep_likely_of_row(args, row, log_ratio):
    assert log_ratio is None
    log_probs = torch.tensor(row.log_probs, dtype=torch.float64)
    return log_probs.exp(), [int(x >= UNLIKELY) for x in row.log_probs], {"likelihood": log_probs.exp()}


def keep_near(*, pg_loss, train_log_probs, rollout_log_probs, local_masks):
    """Reject tokens whose ratio is twice too large or too small, and damp the others."""
    distances = [(train - rollout).abs() for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True)]
    masks = [mask * (distance < math.log(2)) for mask, distance in zip(local_masks, distances, strict=True)]
    damping = torch.cat(distances).neg().exp()
    return pg_loss * damping, masks, {"damping": damping, "kept": torch.cat(masks).float()}


def _keep_near_of_row(args, row, log_ratio):
    damping = torch.tensor([min(r, 1 / r) for r in log_ratio.exp().tolist()], dtype=torch.float64)
    kept = [int(factor > 0.5) for factor in damping.tolist()]
    return damping, kept, {"damping": damping, "kept": torch.tensor(kept, dtype=torch.float64)}


def keep_even(*, pg_loss, loss_masks, **kwargs):
    """Reject every second token; the masks are whole responses, whatever this rank holds of them."""
    return pg_loss, [mask * (torch.arange(len(mask)) % 2 == 0) for mask in loss_masks], {}


def _keep_even_of_row(args, row, log_ratio):
    return torch.ones(len(row.mask), dtype=torch.float64), [1 - place % 2 for place in range(len(row.mask))], {}


def root_length(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Divide each row's sum by the root of the tokens that are left of it."""
    mask = torch.cat(get_local_response_loss_masks(total_lengths, response_lengths, loss_masks))
    roots = [row.sum().clamp_min(1).sqrt().expand(len(row)) for row in loss_masks]
    roots = torch.cat(get_local_response_loss_masks(total_lengths, response_lengths, roots))
    return lambda values: (torch.where(mask != 0, values, 0.0) / roots).sum()


def _root_length_of_step(rows, kept, normalizer):
    return [[1 / (normalizer * max(sum(mask), 1) ** 0.5)] * len(mask) for mask in kept]


KEEP_LIKELY = CustomCorrection(f"{__name__}.{keep_likely.__name__}", _keep_likely_of_row)
KEEP_NEAR = CustomCorrection(f"{__name__}.{keep_near.__name__}", _keep_near_of_row)
KEEP_EVEN = CustomCorrection(f"{__name__}.{keep_even.__name__}", _keep_even_of_row)
ROOT_LENGTH = CustomReducer(f"{__name__}.{root_length.__name__}", _root_length_of_step)
