"""From packed logits to per-token log-probabilities, entropies and values of the responses.

Shapes: B rows; logits `[1, T_all, V]` with "thd" (rows packed, T_all positions on this rank) or `[B, S, V]` with
"bshd"; T_i response tokens of row i on this rank, T = sum_i T_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles.backends.training_utils.cp_utils import (
    get_local_response_loss_masks,
    get_logits_and_tokens_offset_with_cp,
    local_length,
)
from miles.backends.training_utils.loss_aggregation import concat
from miles.backends.training_utils.loss_hub.token_scores import score_tokens
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.options import Options


def get_response_positions(
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return where the response tokens of this rank are predicted.

    Args:
        unconcat_tokens: B whole sequences, row i `[total_length]` int64.
        total_lengths: B lengths of prompt and response.
        response_lengths: B lengths of the response; a row needs at least one prompt token before its response.
        qkv_format: "thd" or "bshd".
        max_seq_lens: B padded lengths, for "bshd".

    Returns:
        `(positions, targets, lengths)`: `[T]` int64 rows of the flattened logits, `[T]` int64 token ids that they
        predict, and the B lengths T_i.
    """
    positions, targets, lengths, offset = [], [], [], 0
    padded_lengths: Sequence[int | None] = [None] * len(total_lengths) if max_seq_lens is None else max_seq_lens
    for tokens, total_length, response_length, max_seq_len in zip(
        unconcat_tokens, total_lengths, response_lengths, padded_lengths, strict=True
    ):
        chunk_size, chunks, logit_ranges, token_ranges = get_logits_and_tokens_offset_with_cp(
            total_length, response_length, qkv_format, max_seq_len
        )
        row_length = 0
        for index, (chunk, logit_range, token_range) in enumerate(
            zip(chunks, logit_ranges, token_ranges, strict=True)
        ):
            base = offset + index * chunk_size - chunk[0]
            positions.append(torch.arange(base + logit_range[0], base + logit_range[1], device=tokens.device))
            targets.append(tokens[token_range[0] : token_range[1]])
            row_length += token_range[1] - token_range[0]
        lengths.append(row_length)
        offset += local_length(total_length, qkv_format, max_seq_len)
    return concat(positions).to(torch.int64), concat(targets).to(torch.int64), lengths


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Options,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    max_seq_lens: Sequence[int] | None = None,
    loss_masks: Sequence[torch.Tensor] | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Return per-token log-probabilities (and entropies) of the responses at `args.rollout_temperature`.

    Args:
        logits: `[1, T_all, V]` ("thd") or `[B, S, V]` ("bshd"), this tensor-parallel rank's share of the vocabulary.
        args: Reads `qkv_format`, `rollout_temperature` and, where present, `log_probs_chunk_size`.
        unconcat_tokens: B whole sequences, int64.
        total_lengths: B lengths of prompt and response.
        response_lengths: B lengths of the response.
        with_entropy: Also return "entropy".
        entropy_requires_grad: False for an entropy that is only logged.
        max_seq_lens: B padded lengths, for "bshd".
        loss_masks: B whole-response masks. Where given, masked tokens get 0 and their logits are not read: neither
            their value nor their gradient can be affected by what the model says there.

    Returns:
        "log_probs" and, on request, "entropy": B tensors `[T_i]` float32, nats.
    """
    positions, targets, lengths = get_response_positions(
        unconcat_tokens, total_lengths, response_lengths, qkv_format=args.qkv_format, max_seq_lens=max_seq_lens
    )
    active = _active_slots(positions, loss_masks, total_lengths, response_lengths, args.qkv_format, max_seq_lens)
    log_probs, entropy = score_tokens(
        logits.reshape(-1, logits.size(-1)),
        positions[active].to(logits.device),
        targets[active].to(logits.device),
        tp=get_parallel_state().tp,
        temperature=args.rollout_temperature,
        entropy_requires_grad=entropy_requires_grad,
        chunk_size=Options.of(args).log_probs_chunk_size,
    )

    def per_row(values: torch.Tensor) -> list[torch.Tensor]:
        scattered = values.new_zeros(positions.numel()).index_put((active.to(values.device),), values)
        return list(scattered.split(lengths)) if lengths else []

    result = {"log_probs": per_row(log_probs)}
    if with_entropy:
        result["entropy"] = per_row(entropy)
    return result


def _active_slots(
    positions: torch.Tensor,
    loss_masks: Sequence[torch.Tensor] | None,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    qkv_format: str,
    max_seq_lens: Sequence[int] | None,
) -> torch.Tensor:
    """Return the indices into `[T]` of the tokens whose mask is set; all of them without masks."""
    if loss_masks is None:
        return torch.arange(positions.numel(), device=positions.device)
    masks = get_local_response_loss_masks(total_lengths, response_lengths, loss_masks, qkv_format, max_seq_lens)
    return concat(masks).nonzero().squeeze(-1)


def get_values(
    logits: torch.Tensor,
    *,
    args: Options,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Return the value head's prediction at each response token.

    Args:
        logits: Value head output `[1, T_all, 1]` ("thd") or `[B, S, 1]` ("bshd").
        args: Reads `qkv_format`.
        unconcat_tokens: B whole sequences, int64.
        total_lengths: B lengths of prompt and response.
        response_lengths: B lengths of the response.
        max_seq_lens: B padded lengths, for "bshd".

    Returns:
        "values": B tensors `[T_i]` float32.

    Raises:
        ValueError: the head's last dimension is not 1.
    """
    if logits.size(-1) != 1:
        raise ValueError(f"a value head has one output per position, got logits of shape {tuple(logits.shape)}")
    positions, _, lengths = get_response_positions(
        unconcat_tokens, total_lengths, response_lengths, qkv_format=args.qkv_format, max_seq_lens=max_seq_lens
    )
    values = logits.reshape(-1).index_select(0, positions.to(logits.device)).float()
    return {"values": list(values.split(lengths)) if lengths else []}
