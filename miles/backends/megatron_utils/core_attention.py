"""Causal attention over packed rows, for the local layer spec, with or without context parallelism.

Megatron-Core's own unfused attention takes neither packed rows nor context parallelism; the fused ones need
Transformer Engine. This one serves where that is not installed. Under context parallelism every rank gathers the keys
and values of the others, which is exact and simple, and holds them whole, which is what makes it one for small models.

Shapes: T tokens on this rank, K = T * cp_size tokens in all, A heads, D per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's packed-row parameters and, for each token on this rank, where it stands.

    Attributes:
        row: Row of each token, int64 [T].
        position: Position of each token in its row, int64 [T].
    """

    row: Tensor | None = None
    position: Tensor | None = None


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
        packed_seq_params: PackedRows,
        **kwargs: Any,
    ) -> Tensor:
        """Map `[T, A, D]` each to `[T, A * D]`; a middle dimension of one batch entry is dropped first."""
        query, key, value = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
        row, position = packed_seq_params.row, packed_seq_params.position
        keys, values = gather_over_cp(key), gather_over_cp(value)
        key_row, key_position = gather_over_cp(row), gather_over_cp(position)
        visible = (row[:, None] == key_row) & (key_position <= position[:, None])
        heads_first = (tensor.transpose(0, 1) for tensor in (query, keys, values))
        mixed = F.scaled_dot_product_attention(*heads_first, attn_mask=visible)
        return mixed.transpose(0, 1).flatten(1)


def gather_over_cp(tensor: Tensor) -> Tensor:
    """Concatenate `[T, ...]` of every context-parallel rank to `[K, ...]`; differentiable."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return tensor
    return _GatherOverCP.apply(tensor)


class _GatherOverCP(torch.autograd.Function):
    """All-gather whose backward pass sums the ranks' gradients and keeps this rank's share."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        size = parallel_state.get_context_parallel_world_size()
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous(), group=parallel_state.get_context_parallel_group())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        size = parallel_state.get_context_parallel_world_size()
        return grad.chunk(size)[parallel_state.get_context_parallel_rank()]
