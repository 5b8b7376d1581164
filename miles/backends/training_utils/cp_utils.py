"""Zigzag context-parallel slices of responses, and the host's reducer over them.

A sequence is split into 2 * cp_size equal chunks (the last ones padded) and rank r holds chunks r and
2 * cp_size - 1 - r, which balances causal attention. The logit at position p predicts token p + 1, so rank r owns the
response tokens whose predicting position lies in its chunks. With one context-parallel rank the two chunks are the
sequence and nothing, so every function below is the identity there without asking.

Shapes: B rows; row i has total_length tokens, of which the last response_length are the response; T_i of these are on
this rank. `qkv_format` is "thd" (rows packed, each padded to its own multiple) or "bshd" (rows padded to max_seq_len).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed.nn.functional as dist_nn

from miles.backends.training_utils.loss_aggregation import concat, make_packed_reducer, packed_mask_sums, send
from miles.backends.training_utils.parallel import get_parallel_state

Range = tuple[int, int]


def get_logits_and_tokens_offset_with_cp(
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """Return what this rank holds of one sequence, as offsets from the sequence's first token.

    Args:
        total_length: Tokens of prompt and response.
        response_length: Tokens of the response, `<= total_length`.
        qkv_format: "thd" or "bshd".
        max_seq_len: Padded length, needed for "bshd".
        cp_rank: Rank to answer for; None is this process.
        cp_size: Context-parallel size; None is this process's.

    Returns:
        `(chunk_size, chunks, logits, tokens)`: the length of a chunk; the half-open ranges of the two chunks; the
        ranges of positions in them that predict a response token; the ranges of those tokens. A range without
        positions is `(0, 0)`.

    Raises:
        ValueError: "bshd" without `max_seq_len`, or an unknown format.
    """
    if cp_rank is None or cp_size is None:
        cp = get_parallel_state().cp
        cp_rank, cp_size = cp.rank, cp.size
    [padded_length] = _padded_lengths([total_length], qkv_format, None if max_seq_len is None else [max_seq_len])
    if cp_size == 1:
        chunk_size = padded_length
        chunks = (0, padded_length), (padded_length, padded_length)
    else:
        chunk_size = -(-padded_length // (2 * cp_size))
        first, mirror = cp_rank * chunk_size, (2 * cp_size - 1 - cp_rank) * chunk_size
        chunks = (first, first + chunk_size), (mirror, mirror + chunk_size)

    def predicting(chunk: Range) -> Range:
        start, end = max(chunk[0], total_length - response_length - 1, 0), min(chunk[1], total_length - 1)
        return (start, end) if start < end else (0, 0)

    def predicted(positions: Range) -> Range:
        start, end = positions
        return (start + 1, end + 1) if start < end else (0, 0)

    logits = predicting(chunks[0]), predicting(chunks[1])
    return chunk_size, chunks, logits, (predicted(logits[0]), predicted(logits[1]))


def _padded_lengths(
    total_lengths: Sequence[int], qkv_format: str, max_seq_lens: Sequence[int] | None
) -> Sequence[int]:
    """Return what each of several sequences is padded to before it is divided into chunks."""
    if qkv_format not in ("thd", "bshd"):
        raise ValueError(f"qkv_format must be 'thd' or 'bshd', got {qkv_format!r}")
    if qkv_format == "thd":
        return total_lengths
    if max_seq_lens is None:
        raise ValueError("qkv_format 'bshd' needs max_seq_len, the length that rows are padded to")
    return max_seq_lens


def local_length(total_length: int, qkv_format: str = "thd", max_seq_len: int | None = None) -> int:
    """Return how many positions of one (padded) sequence this rank holds."""
    _, chunks, *_ = get_logits_and_tokens_offset_with_cp(total_length, 0, qkv_format, max_seq_len)
    return sum(end - start for start, end in chunks)


def slice_log_prob_with_cp(
    log_prob: torch.Tensor,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
) -> torch.Tensor:
    """Slice one response's values `[response_length]` to the `[T_i]` on this rank; ValueError where they are fewer."""
    max_seq_lens = None if max_seq_len is None else [max_seq_len]
    [local] = get_local_response_loss_masks([total_length], [response_length], [log_prob], qkv_format, max_seq_lens)
    return local


def _slice_loss_mask_for_local_cp(
    total_length: int,
    response_length: int,
    loss_mask: torch.Tensor,
    qkv_format: str,
    max_seq_len: int | None,
) -> torch.Tensor:
    """Slice one response's loss mask to this rank's tokens; the host's name and argument order."""
    return slice_log_prob_with_cp(loss_mask, total_length, response_length, qkv_format, max_seq_len)


def get_local_response_loss_masks(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Slice the loss mask, or other values, of each of B responses to this rank's tokens.

    Args:
        total_lengths: B lengths of prompt and response.
        response_lengths: B lengths of the response.
        loss_masks: B rows `[response_length]`.
        qkv_format: "thd" or "bshd".
        max_seq_lens: B padded lengths, for "bshd".

    Returns:
        B rows `[T_i]`.

    Raises:
        ValueError: a row does not cover its response.
    """
    _check_rows(total_lengths, response_lengths, loss_masks)
    shares = _local_shares(total_lengths, response_lengths, qkv_format, max_seq_lens)
    if shares is None or not loss_masks:
        return list(loss_masks)
    local, lengths = _keep_shares(concat(loss_masks), shares)
    return list(local.split(lengths))


def _check_rows(total_lengths: Sequence[int], response_lengths: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
    """Refuse rows that do not have one value for each token of their response."""
    if len(total_lengths) != len(rows) or len(response_lengths) != len(rows):
        raise ValueError(f"expected lengths of {len(rows)} rows, got {len(total_lengths)} and {len(response_lengths)}")
    lengths = [row.numel() for row in rows]
    if lengths != list(response_lengths):
        wanted, got = next(pair for pair in zip(response_lengths, lengths, strict=True) if pair[0] != pair[1])
        raise ValueError(f"expected one value for each of {wanted} response tokens, got {got}")


def _local_shares(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    qkv_format: str,
    max_seq_lens: Sequence[int] | None,
) -> np.ndarray | None:
    """Return how each response falls apart on this rank, or None where every rank holds all of it.

    Returns:
        `[B, 5]` int64 lengths of what is elsewhere, here, elsewhere, here and elsewhere, in the response's order.
    """
    cp = get_parallel_state().cp
    padded = np.asarray(_padded_lengths(total_lengths, qkv_format, max_seq_lens), dtype=np.int64)
    if cp.size == 1:
        return None
    totals, responses = np.asarray(total_lengths, dtype=np.int64), np.asarray(response_lengths, dtype=np.int64)
    first = totals - responses - 1  # the position that predicts the first response token
    chunk_size = -(-padded // (2 * cp.size))

    def share(index: int) -> tuple[np.ndarray, np.ndarray]:
        # Without a prompt no position predicts the first token; it then goes with position 0.
        start = np.clip(index * chunk_size - first, 0, responses) if index > 0 else np.zeros_like(first)
        return start, np.maximum(np.minimum((index + 1) * chunk_size, totals - 1) - first, start)

    edges = [np.zeros_like(first), *share(cp.rank), *share(2 * cp.size - 1 - cp.rank), responses]
    return np.diff(np.stack(edges, axis=1))


def _keep_shares(packed: torch.Tensor, shares: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """Reduce B packed responses to this rank's tokens, in one gather; return them and their B lengths T_i."""
    here = np.resize([False, True, False, True, False], shares.size)
    index = send(np.flatnonzero(np.repeat(here, shares.ravel())), packed.device)
    return packed.index_select(0, index), (shares[:, 1] + shares[:, 3]).tolist()


def gather_responses_with_cp(
    local_rows: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Put the tokens of all context-parallel ranks together: `[T_i]` to `[response_length]` of each of B rows.

    The inverse of `get_local_response_loss_masks`; one collective over the context-parallel ranks, without gradient.
    """
    num_tokens = sum(response_lengths)
    positions = torch.arange(num_tokens).split(list(response_lengths))
    index = concat(get_local_response_loss_masks(total_lengths, response_lengths, positions, qkv_format, max_seq_lens))
    local = concat(local_rows)
    whole = local.new_zeros(num_tokens)
    whole[index.to(local.device, torch.int64)] = local
    whole = get_parallel_state().cp.all_reduce(whole).to(local.device)
    return list(whole.split(list(response_lengths)))


def slice_with_cp(
    tokens: torch.Tensor, pad_value: int, qkv_format: str = "thd", max_seq_len: int | None = None
) -> torch.Tensor:
    """Slice one whole sequence `[total_length]` into this rank's padded zigzag layout `[local_length]`."""
    length = tokens.size(0)
    _, chunks, *_ = get_logits_and_tokens_offset_with_cp(length, 0, qkv_format, max_seq_len)
    last = max(end for _, end in chunks)
    padded = torch.nn.functional.pad(tokens, (0, max(last - length, 0)), value=pad_value)
    return torch.cat([padded[start:end] for start, end in chunks])


def all_reduce_with_cp(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the context-parallel ranks, differentiably: each rank's gradient is the sum over ranks."""
    cp = get_parallel_state().cp
    if cp.size == 1:
        return tensor
    if cp.group is None:
        raise RuntimeError("a sum over context-parallel ranks needs a process group, and this parallel state has none")
    return dist_nn.all_reduce(tensor, group=cp.group)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
    sample_denoms: torch.Tensor | Sequence[torch.Tensor | float] | None = None,
    constant_divisor: float | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build the reducer x -> sum_i (1 / d_i) sum_t m_it x_it over this rank's tokens.

    The divisor d_i is max(m_i, 1) by default (m_i over the whole response, not over this rank's share), 1 with
    `calculate_per_token_loss`, `sample_denoms[i]` or `constant_divisor`. It is the host's function of that name.

    Args:
        total_lengths: B lengths of prompt and response.
        response_lengths: B lengths of the response.
        loss_masks: B whole-response masks, row i `[response_length]`, values 0 and 1.
        calculate_per_token_loss: Sum over tokens instead of over sample means.
        qkv_format: "thd" or "bshd".
        max_seq_lens: B padded lengths, for "bshd".
        sample_denoms: B positive divisors (0 acts as 1), from the whole step.
        constant_divisor: One positive divisor for all rows (L of Dr.GRPO).

    Returns:
        The reducer of `make_reducer`; sum its results over micro-batches and over data- and context-parallel ranks.

    Raises:
        ValueError: more than one of the last three choices, or a divisor count that is not B.
    """
    choices = [calculate_per_token_loss, sample_denoms is not None, constant_divisor is not None]
    if sum(map(bool, choices)) > 1:
        raise ValueError(
            "calculate_per_token_loss, sample_denoms and constant_divisor are mutually exclusive; give at most one"
        )
    _check_rows(total_lengths, response_lengths, loss_masks)
    shares = _local_shares(total_lengths, response_lengths, qkv_format, max_seq_lens)
    mask = concat(loss_masks)
    lengths = send(response_lengths, mask.device, dtype=torch.int64)
    denominators: torch.Tensor | float
    if calculate_per_token_loss:
        denominators = 1.0
    elif constant_divisor is not None:
        denominators = constant_divisor
    elif sample_denoms is not None:
        denominators = as_row_tensor(sample_denoms, like=loss_masks)
    else:
        denominators = packed_mask_sums(mask, lengths)
    if shares is not None:
        mask, local_lengths = _keep_shares(mask, shares)
        lengths = send(local_lengths, mask.device, dtype=torch.int64)
    return make_packed_reducer(mask, lengths, denominators=denominators)


def as_row_tensor(
    values: torch.Tensor | Sequence[torch.Tensor | float], *, like: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return per-row scalars as one `[B]` tensor on the device of `like`, in a single transfer."""
    if isinstance(values, torch.Tensor):
        return values.to(like[0].device) if like else values
    tensors = [value.reshape(()) for value in values if isinstance(value, torch.Tensor)]
    if tensors and len(tensors) == len(values):
        return torch.stack(tensors)
    return send(list(values), like[0].device if like else torch.device("cpu"))
