"""Context parallelism: a rank has a chunk from the front of each sequence and one from its back."""

from collections.abc import Callable

import torch

from .parallel import get_parallel_state


def local_positions(total_length):
    """Return the positions of a sequence that this rank has."""
    cp = get_parallel_state().cp
    if cp.size == 1:
        return list(range(total_length))
    chunk = -(-total_length // (2 * cp.size))
    front = range(cp.rank * chunk, (cp.rank + 1) * chunk)
    back = range((2 * cp.size - cp.rank - 1) * chunk, (2 * cp.size - cp.rank) * chunk)
    return [position for position in (*front, *back) if position < total_length]


def local_response_rows(total_length, response_length):
    """Return the response tokens whose logits this rank has; the logit of a token is at the position before it."""
    first_logit = total_length - response_length - 1
    rows = (position - first_logit for position in local_positions(total_length))
    return [row for row in rows if 0 <= row < response_length]


def slice_log_prob_with_cp(log_prob, total_length, response_length, qkv_format="thd", max_token_len=None):
    """Return this rank's part of a row of per-token values."""
    rows = local_response_rows(total_length, response_length)
    return [log_prob[row] for row in rows] if isinstance(log_prob, list) else log_prob[rows]


def _slice_loss_mask_for_local_cp(total_length, response_length, loss_mask, qkv_format="thd", max_seq_len=None):
    return slice_log_prob_with_cp(loss_mask, total_length, response_length, qkv_format, max_seq_len)


def get_sum_of_sample_mean(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: list[int] | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    rows = zip(total_lengths, response_lengths, loss_masks, strict=True)
    local_masks = [_slice_loss_mask_for_local_cp(total, response, mask) for total, response, mask in rows]
    sizes = [mask.numel() for mask in local_masks]

    def sum_of_sample_mean(x: torch.Tensor) -> torch.Tensor:
        means = [
            (part * local).sum() / whole.sum().clamp_min(1)
            for part, local, whole in zip(x.split(sizes), local_masks, loss_masks, strict=True)
        ]
        return sum(means)

    def sum_of_token(x: torch.Tensor) -> torch.Tensor:
        return sum((part * local).sum() for part, local in zip(x.split(sizes), local_masks, strict=True))

    return sum_of_token if calculate_per_token_loss else sum_of_sample_mean
