"""Context parallelism: a rank has a chunk from the front of each sequence and one from its back."""

from collections.abc import Callable

import torch

from slime.backends.megatron_utils import mpu


def local_positions(total_length):
    """Return the positions of a sequence that this rank has."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return list(range(total_length))
    chunk = -(-total_length // (2 * size))
    starts = (rank * chunk, (2 * size - rank - 1) * chunk)
    return [position for start in starts for position in range(start, min(start + chunk, total_length))]


def slice_log_prob_with_cp(log_prob, total_length, response_length):
    """Return this rank's part of a row of per-token values; the logit of a token is at the position before it."""
    prompt = total_length - response_length
    rows = [position + 1 - prompt for position in local_positions(total_length)]
    rows = [row for row in rows if 0 <= row < response_length]
    return [log_prob[row] for row in rows] if isinstance(log_prob, list) else log_prob[rows]


def get_sum_of_sample_mean(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    sample_denoms: list[torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    if sample_denoms is None:
        sample_denoms = [mask.sum() for mask in loss_masks]
    rows = zip(loss_masks, total_lengths, response_lengths, strict=True)
    local_masks = [slice_log_prob_with_cp(*row) for row in rows]
    sizes = [mask.numel() for mask in local_masks]

    def sum_of_sample_mean(x):
        parts = zip(x.split(sizes), local_masks, sample_denoms, strict=True)
        return sum((part * mask).sum() / torch.clamp_min(denom, 1) for part, mask, denom in parts)

    def sum_of_token(x):
        return sum((part * mask).sum() for part, mask in zip(x.split(sizes), local_masks, strict=True))

    return sum_of_token if calculate_per_token_loss else sum_of_sample_mean
