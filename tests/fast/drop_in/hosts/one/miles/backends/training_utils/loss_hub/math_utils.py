"""Per-token quantities."""

import torch

from ..cp_utils import _slice_loss_mask_for_local_cp, local_positions, local_response_rows


def compute_approx_kl(log_probs, other):
    ratio = other - log_probs
    return ratio.exp() - 1 - ratio


def compute_ess_ratio_contribution(
    *, ppo_kl, loss_masks, total_lengths, response_lengths, qkv_format, max_seq_lens, calculate_per_token_loss
):
    """Return the share of on-policy weight, summed over rows; times their tokens where a sum over tokens is asked."""
    rows = zip(total_lengths, response_lengths, loss_masks, strict=True)
    masks = [_slice_loss_mask_for_local_cp(total, response, mask) for total, response, mask in rows]
    total = ppo_kl.new_zeros(())
    for kl, mask, whole in zip(ppo_kl.split([mask.numel() for mask in masks]), masks, loss_masks, strict=True):
        weights = (-kl).exp() * mask
        share = weights.sum() ** 2 / (weights**2).sum().clamp_min(1e-8)
        total = total + (share if calculate_per_token_loss else share / whole.sum().clamp_min(1))
    return total


def get_log_probs_and_entropy(logits, *, unconcat_tokens, total_lengths, response_lengths):
    log_probs, entropy, start = [], [], 0
    for tokens, total_length, response_length in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        positions = local_positions(total_length)
        first = total_length - response_length
        rows = local_response_rows(total_length, response_length)
        here = [start + positions.index(first + row - 1) for row in rows]
        start += len(positions)
        table = torch.log_softmax(logits[here], dim=-1)
        log_probs.append(table.gather(1, tokens[[first + row for row in rows]].unsqueeze(1)).squeeze(1))
        entropy.append(-(table.exp() * table).sum(-1))
    return {"log_probs": log_probs, "entropy": entropy}
