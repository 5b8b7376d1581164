"""Log-probabilities and entropies of chosen tokens, from logits that may be split over the vocabulary.

Shapes: R positions of flattened logits; V entries of the vocabulary on this rank; T scored tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.parallel import GroupInfo

CHUNK_ELEMENTS = {"cpu": 1 << 20}
"""Logits that are copied to float32 at a time at most, unless the caller asks for another chunk: 4 MiB, which a CPU's
cache holds. Devices that are not named here take `ACCELERATOR_CHUNK_ELEMENTS`."""

ACCELERATOR_CHUNK_ELEMENTS = 1 << 24
"""64 MiB, enough that starting kernels does not count."""

SMALLEST_CHUNK_ELEMENTS = 1 << 18
"""1 MiB. Smaller chunks would cost more time than they save memory."""

NUM_CHUNKS = 32
"""Logits are split into at least so many; a chunk then takes 0.1 (float32) to 0.2 times their memory (bfloat16)."""

LOWEST = -1e30
"""In place of -inf among logits relative to their peak: its exponential is 0, and 0 times it is 0, not NaN."""


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
        chunk_size: Tokens in a chunk; -1 takes `NUM_CHUNKS` chunks or more. The memory at the peak, forward and
            backward together, is then at most 1.3 times that of the logits, their gradient included, if these are
            2^23 or more in number.

    Returns:
        `(log_probs, entropy)`, `[T]` float32, nats. A logit of -inf is a token that cannot be chosen. A log-prob is
        NaN where the target lies on no rank, or on more than one.
    """
    if chunk_size < 1:
        chunk_size = _chunk_size(logits)
    log_probs, entropy = _TokenScores.apply(logits, positions, targets, tp, temperature, chunk_size)
    return log_probs, entropy if entropy_requires_grad else entropy.detach()


class _TokenScores(torch.autograd.Function):
    """The scores of all chunks, and their gradient.

    With x = logits / temperature - their peak, Z = sum_v exp x_v and p_v = exp(x_v) / Z: log p_v = x_v - log Z and
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
        buffers = _buffers(logits, positions, chunk_size)
        for rows, columns in zip(positions.split(chunk_size), local.split(chunk_size), strict=True):
            raw, shifted, weights = (buffer[: rows.numel()] for buffer in buffers)
            torch.index_select(logits, 0, rows, out=raw)
            # Where no entry lies above -inf, -inf - -inf would be NaN.
            peak = (raw.amax(-1).float() / temperature).clamp_min(torch.finfo(torch.float32).min)
            _shift(raw, peak, temperature, out=shifted)
            chosen = torch.add(-peak, raw.gather(-1, columns.unsqueeze(-1)).squeeze(-1), alpha=1 / temperature)
            total = torch.exp(shifted, out=weights).sum(-1)
            parts.append(torch.stack([peak, total, weights.mul_(shifted).sum(-1), chosen]))
        sums = torch.cat(parts, dim=1) if parts else logits.new_zeros(4, 0, dtype=torch.float32)
        peak, total, weighted, chosen = _over_vocabulary(sums, is_local, tp)
        log_z = total.log()
        entropy = log_z - weighted / total
        ctx.save_for_backward(logits, positions, local, is_local, entropy, peak, log_z)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return chosen - log_z, entropy.clone()

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        logits, positions, local, is_local, entropy, peak, log_z = ctx.saved_tensors
        # -p_v (g + h (log p_v + H)) / temperature = exp(x_v) (base + slope x_v), g and h being the two gradients
        scale = -torch.exp(-log_z) / ctx.temperature
        slope = scale * grad_entropy
        base = scale * (grad_log_probs + grad_entropy * (entropy - log_z))
        at_target = grad_log_probs * is_local / ctx.temperature
        grad = torch.zeros_like(logits)
        buffers = _buffers(logits, positions, ctx.chunk_size)
        columns = [column.split(ctx.chunk_size) for column in (positions, local, peak, base, slope, at_target)]
        for rows, *per_row in zip(*columns, strict=True):
            raw, shifted, chunk = (buffer[: rows.numel()] for buffer in buffers)
            targets, row_peak, row_base, row_slope, row_target = (column.unsqueeze(-1) for column in per_row)
            torch.index_select(logits, 0, rows, out=raw)
            _shift(raw, row_peak.squeeze(-1), ctx.temperature, out=shifted)
            torch.exp(shifted, out=chunk)
            chunk.mul_(torch.addcmul(row_base, row_slope, shifted, out=shifted))
            chunk.scatter_add_(-1, targets, row_target)
            grad.index_copy_(0, rows, chunk.to(grad.dtype))
        return grad, None, None, None, None, None


def _buffers(logits: torch.Tensor, positions: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, ...]:
    """Return memory for a chunk of logits and twice for its float32 copy, which all chunks share."""
    shape = (min(chunk_size, positions.numel()), logits.size(-1))
    return logits.new_empty(shape), *logits.new_empty((2, *shape), dtype=torch.float32).unbind()


def _chunk_size(logits: torch.Tensor) -> int:
    """Return how many tokens make a chunk."""
    largest = CHUNK_ELEMENTS.get(logits.device.type, ACCELERATOR_CHUNK_ELEMENTS)
    elements = min(largest, max(logits.numel() // NUM_CHUNKS, SMALLEST_CHUNK_ELEMENTS))
    return max(elements // logits.size(-1), 1)


def _shift(rows: torch.Tensor, peak: torch.Tensor, temperature: float, *, out: torch.Tensor) -> None:
    """Write rows / temperature - peak in float32, `LOWEST` where that is -inf."""
    torch.add(-peak.unsqueeze(-1), rows, alpha=1 / temperature, out=out).clamp_min_(LOWEST)


def _over_vocabulary(sums: torch.Tensor, is_local: torch.Tensor, tp: GroupInfo) -> tuple[torch.Tensor, ...]:
    """Return the peaks of the whole vocabulary and the sums relative to them, from those of this rank's share.

    `sums` and the result are peak, sum exp, sum exp(x) x and the chosen x, `[T]` each.

    With s = peak - whole peak: sum exp(x + s) = exp(s) sum exp x, and sum exp(x + s) (x + s) likewise. What is chosen
    is NaN where not exactly one rank has it.
    """
    peak, total, weighted, chosen = sums.unbind()
    whole_peak = tp.all_reduce(peak.clone(), op=dist.ReduceOp.MAX)
    step = peak - whole_peak
    share = step.exp()
    local = torch.where(is_local, chosen + step, 0)
    shares = [share * total, share * (weighted + step * total), local, is_local.to(local.dtype)]
    total, weighted, chosen, num_holders = tp.all_reduce(torch.stack(shares)).unbind()
    return whole_peak, total, weighted, torch.where(num_holders == 1, chosen, torch.nan)


def _localize(targets: torch.Tensor, vocab_size: int, tp: GroupInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's column on this rank (0 where it lies elsewhere) and whether it lies here."""
    local = targets - tp.rank * vocab_size
    is_local = (local >= 0) & (local < vocab_size)
    return torch.where(is_local, local, 0), is_local
