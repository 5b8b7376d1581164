"""Causal attention over packed rows, for the local layer spec, with or without context parallelism.

Megatron-Core's own unfused attention takes neither packed rows nor context parallelism; the fused ones need
Transformer Engine. This one serves where that is not installed. It attends to one row at a time, so that what it
needs beyond its inputs and outputs grows with the longest row, not with the micro-batch. Under context parallelism
every rank gathers the keys and values of the others, which is exact and simple, and made for small models.

Shapes: B rows of P_i tokens, padded at their end; T tokens on this rank, T = sum_i P_i / cp_size; A heads, D per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from miles.backends.training_utils.cp_utils import all_reduce_with_cp, get_logits_and_tokens_offset_with_cp
from miles.backends.training_utils.parallel import get_parallel_state


class PackedCoreAttention(MegatronModule):
    """softmax(Q K^T / sqrt(D)) V where a token sees its own row up to itself."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        """Take the keywords that Megatron's layer spec gives a core attention; only the config matters here."""
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> Tensor:
        """Map `[T, A, D]` each to `[T, A * D]`; a middle dimension of one batch entry is dropped first."""
        query, key, value = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
        keys_values = gather_over_cp(torch.stack([key, value], dim=1))
        lengths = (packed_seq_params.cu_seqlens_q.diff() // keys_values.size(0)).tolist()
        rows = zip(query.split(lengths), keys_values.split(lengths, dim=1), strict=True)
        return torch.cat([_attend(*row) for row in rows]).flatten(1)


def _attend(query: Tensor, keys_values: Tensor) -> Tensor:
    """Attend from this rank's `[P / cp_size, A, D]` queries of a row to its `[cp_size, P / cp_size, 2, A, D]` keys."""
    cp, length = get_parallel_state().cp, keys_values.size(0) * keys_values.size(1)
    places = [_zigzag_positions(length, rank, cp.size) for rank in range(cp.size)]
    local = places[cp.rank].to(query.device)
    # Each token goes to its place in the whole row, where the causal mask has a fast kernel and needs no memory.
    in_order = torch.cat(places).argsort().to(query.device)
    queries = query.new_zeros(in_order.numel(), *query.shape[1:]).index_copy(0, local, query)
    keys, values = keys_values.flatten(0, 1)[in_order].unbind(1)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)[0].transpose(0, 1)[local]


def _zigzag_positions(length: int, cp_rank: int, cp_size: int) -> Tensor:
    """Return which positions of a padded row a context-parallel rank holds, int64 `[length / cp_size]`."""
    _, chunks, *_ = get_logits_and_tokens_offset_with_cp(length, 0, cp_rank=cp_rank, cp_size=cp_size)
    return torch.cat([torch.arange(*chunk) for chunk in chunks])


def gather_over_cp(tensor: Tensor) -> Tensor:
    """Stack `[T, ...]` of every context-parallel rank to `[cp_size, T, ...]`; a gradient sums over the ranks."""
    cp = get_parallel_state().cp
    others = torch.zeros_like(tensor)
    return all_reduce_with_cp(torch.stack([tensor if rank == cp.rank else others for rank in range(cp.size)]))
