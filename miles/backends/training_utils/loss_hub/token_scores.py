"""Log-probabilities and entropies of chosen tokens, from logits that may be split over the vocabulary.

Shapes: R positions of flattened logits; V entries of the vocabulary on this rank; T scored tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.parallel import GroupInfo

CHUNK_ELEMENTS = 1 << 22
"""Logits that are copied to float32 at a time unless the caller asks for another chunk: 16 MiB."""


def score_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    targets: torch.Tensor,
    *,
    tp: GroupInfo,
    temperature: float = 1.0,
    entropy_requires_grad: bool = True,
    chunk_size: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and the entropy -sum_v p_v log p_v at each position, p = softmax(logits / temperature).

    Softmax runs in float32 over chunks of tokens, and again in the backward pass, so that beside the logits only their
    gradient is ever held whole. With the vocabulary split over tensor-parallel ranks, rank r holds entries
    [r * V, (r + 1) * V); every rank returns the same values and the gradient of its own entries.

    Args:
        logits: `[R, V]`, any float dtype.
        positions: `[T]` int64, distinct rows of `logits`. Other rows are not read and get a zero gradient.
        targets: `[T]` int64, ids in the whole vocabulary.
        tp: Tensor-parallel axis.
        temperature: Divides the logits.
        entropy_requires_grad: False for an entropy that is only logged.
        chunk_size: Tokens in a chunk; -1 takes as many as make `CHUNK_ELEMENTS`.

    Returns:
        `(log_probs, entropy)`, `[T]` float32, nats.
    """
    chunk_size = chunk_size if chunk_size > 0 else max(CHUNK_ELEMENTS // logits.size(-1), 1)
    log_probs, entropy = _TokenScores.apply(logits, positions, targets, tp, temperature, chunk_size)
    return log_probs, entropy if entropy_requires_grad else entropy.detach()


class _TokenScores(torch.autograd.Function):
    """The scores of all chunks, and their gradient.

    With x = logits / temperature - their peak: log Z = log sum_v exp x_v, log p_v = x_v - log Z and
    H = log Z - sum_v p_v x_v; d log p_y / d x_v = [v = y] - p_v and d H / d x_v = -p_v (log p_v + H).
    Peak and log Z stay apart, since their sum would round away what log p is made of.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        tp: GroupInfo,
        temperature: float,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local, is_local = _localize(targets, logits.size(-1), tp)
        parts = []
        for rows, columns, here in zip(
            positions.split(chunk_size), local.split(chunk_size), is_local.split(chunk_size), strict=True
        ):
            scaled = logits[rows].float() / temperature
            peak = tp.all_reduce(scaled.amax(-1), op=dist.ReduceOp.MAX)
            shifted = scaled - peak.unsqueeze(-1)
            weights = shifted.exp()
            chosen = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1) * here
            sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), chosen])
            total, weighted, chosen = tp.all_reduce(sums).unbind()
            log_z = total.log()
            parts.append(torch.stack([chosen - log_z, log_z - weighted / total, peak, log_z]))
        scores = torch.cat(parts, dim=1) if parts else logits.new_zeros(4, 0, dtype=torch.float32)
        log_probs, entropy, peak, log_z = scores.unbind()
        ctx.save_for_backward(logits, positions, local, is_local, entropy, peak, log_z)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return log_probs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        logits, positions, *columns = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        columns = [column.split(ctx.chunk_size) for column in (positions, *columns, grad_log_probs, grad_entropy)]
        for rows, local, is_local, entropy, peak, log_z, g_log_prob, g_entropy in zip(*columns, strict=True):
            log_p = logits[rows].float() / ctx.temperature - peak.unsqueeze(-1) - log_z.unsqueeze(-1)
            towards = -(g_log_prob.unsqueeze(-1) + g_entropy.unsqueeze(-1) * (log_p + entropy.unsqueeze(-1)))
            chunk = log_p.exp() * towards
            chunk.scatter_add_(-1, local.unsqueeze(-1), (g_log_prob * is_local).unsqueeze(-1))
            grad[rows] = (chunk / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None, None


def _localize(targets: torch.Tensor, vocab_size: int, tp: GroupInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's column on this rank (0 where it lies elsewhere) and whether it lies here, as 0 and 1."""
    local = targets - tp.rank * vocab_size
    is_local = (local >= 0) & (local < vocab_size)
    return torch.where(is_local, local, 0), is_local.to(torch.float32)
