"""Log-probs and entropy from logits, forward and backward. `python -m tests.benchmarks.bench_log_probs`.

Peak memory is what operations allocate beside the logits, counted exactly (`PeakStorage`), the logits' gradient
included, in units of the logits. Competitors, restated here: log_softmax of all logits, with the entropy and without.
The last table splits the vocabulary over two gloo processes of one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.loss_hub.token_scores import score_tokens
from miles.backends.training_utils.parallel import SINGLE, GroupInfo
from tests.benchmarks.common import PeakStorage, interleaved, parser, positive, report, time_rows

Scores = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def plain(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of the whole in float32."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def plain_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without the entropy, which is less than what the others compute."""
    log_probs = torch.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probs, log_probs.detach()


def ours(logits: torch.Tensor, targets: torch.Tensor, tp: GroupInfo = SINGLE) -> tuple[torch.Tensor, torch.Tensor]:
    """The package's."""
    return score_tokens(logits, torch.arange(logits.size(0)), targets, tp=tp)


COMPETITORS: dict[str, Scores] = {"ours": ours, "plain": plain, "plain, no entropy": plain_log_probs}


def forward_and_backward(scores: Scores, logits: torch.Tensor, targets: torch.Tensor) -> None:
    """Score the targets and leave the gradient in `logits.grad`."""
    logits.grad = None
    log_probs, entropy = scores(logits, targets)
    (log_probs.sum() + 0.01 * entropy.sum()).backward()


def inputs(num_tokens: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[T, V]` that want a gradient, and targets `[T]`."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, vocab_size, generator=generator).to(dtype)
    return logits.requires_grad_(), torch.randint(vocab_size, (num_tokens,), generator=generator)


def memory(num_tokens: int, vocab_size: int, dtype: torch.dtype) -> list[dict]:
    """Return each competitor's peak beside the logits, in units of the logits."""
    logits, targets = inputs(num_tokens, vocab_size, dtype)
    size = logits.untyped_storage().nbytes() >> 20
    return [
        {"competitor": name, "logits MiB": size, "peak / logits": _peak(scores, logits, targets)}
        for name, scores in COMPETITORS.items()
    ]


def times(num_tokens: int, vocab_size: int, dtype: torch.dtype, rounds: int, clock: str) -> list[dict]:
    """Time all competitors on the same logits."""
    logits, targets = inputs(num_tokens, vocab_size, dtype)
    competitors = {
        name: lambda scores=scores: forward_and_backward(scores, logits, targets)
        for name, scores in COMPETITORS.items()
    }
    return time_rows(interleaved(competitors, rounds, clock), ours="ours", tokens=num_tokens, vocabulary=vocab_size)


class PlainShare(torch.autograd.Function):
    """Log-probs and entropy of a split vocabulary as trainers take them: in float32, whole, softmax and all kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, tp: GroupInfo
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shifted = logits.float()
        shifted = shifted - tp.all_reduce(shifted.amax(-1), op=dist.ReduceOp.MAX).unsqueeze(-1)
        columns = targets - tp.rank * logits.size(-1)
        is_local = (columns >= 0) & (columns < logits.size(-1))
        columns = torch.where(is_local, columns, 0).unsqueeze(-1)
        chosen = tp.all_reduce(torch.where(is_local, shifted.gather(-1, columns).squeeze(-1), 0))
        softmax = shifted.exp()
        total = tp.all_reduce(softmax.sum(-1))
        softmax.div_(total.unsqueeze(-1))
        log_softmax = shifted.sub_(total.log().unsqueeze(-1))
        entropy = -tp.all_reduce((softmax * log_softmax).sum(-1))
        ctx.save_for_backward(softmax, log_softmax, entropy, columns, is_local)
        ctx.dtype = logits.dtype
        return chosen - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, log_softmax, entropy, columns, is_local = ctx.saved_tensors
        slope = log_softmax.add_(entropy.unsqueeze(-1)).mul_(grad_entropy.unsqueeze(-1))
        result = slope.add_(grad.unsqueeze(-1)).mul_(softmax).neg_()
        result.scatter_add_(-1, columns, (grad * is_local).unsqueeze(-1))
        return result.to(ctx.dtype), None, None


def _share(
    rank: int, world_size: int, directory: str, shape: tuple[int, int], dtype: torch.dtype, rounds: int
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    tp = GroupInfo(rank, world_size, dist.group.WORLD)
    whole, targets = inputs(*shape, dtype)
    share = whole.detach().chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    del whole
    competitors: dict[str, Scores] = {
        "ours": lambda *tensors: ours(*tensors, tp),
        "plain": lambda *tensors: PlainShare.apply(*tensors, tp),
    }
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(rounds + 1):
        for name, scores in competitors.items():
            dist.barrier()
            start = time.perf_counter()
            forward_and_backward(scores, share, targets)
            seconds[name].append(time.perf_counter() - start)
    peaks = {name: _peak(scores, share, targets) for name, scores in competitors.items()}
    torch.save([{name: turns[1:] for name, turns in seconds.items()}, peaks], f"{directory}/{rank}")
    dist.destroy_process_group()


def _peak(scores: Scores, logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the peak beside the logits, in units of the logits."""
    logits.grad = None
    with PeakStorage(logits, targets) as storage:
        forward_and_backward(scores, logits, targets)
    return storage.peak / logits.untyped_storage().nbytes()


def vocabulary_parallel(shape: tuple[int, int], dtype: torch.dtype, rounds: int, world_size: int = 2) -> list[dict]:
    """Time and measure each rank's part of a split vocabulary, on one thread."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = (world_size, directory, shape, dtype, rounds)
        torch.multiprocessing.start_processes(_share, arguments, nprocs=world_size, start_method="fork")
        found = [torch.load(f"{directory}/{rank}") for rank in range(world_size)]
    return [
        {**row, "peak / share": peaks[row["competitor"]]}
        for rank, (seconds, peaks) in enumerate(found)
        for row in time_rows(seconds, ours="ours", rank=rank, tokens=shape[0], vocabulary=shape[1])
    ]


def main() -> None:
    """Print memory and times."""
    options = parser(__doc__, rounds=3, has_clock=True)
    options.add_argument("--tokens", type=positive, default=8192, help="scored tokens (default: 8192)")
    help_text = "size of the vocabulary, which two processes halve (default: 32768)"
    options.add_argument("--vocabulary", type=positive, default=32768, help=help_text)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the logits")
    args = options.parse_args()
    if args.vocabulary % 2:
        options.error(f"--vocabulary must be even, got {args.vocabulary}")
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    eighth = max(args.tokens // 8, 1), args.vocabulary
    split = vocabulary_parallel(eighth, dtype, args.rounds)  # before this process starts threads
    tables = {
        "peak memory beside the logits": memory(args.tokens, args.vocabulary, dtype),
        "time": times(args.tokens, args.vocabulary, dtype, args.rounds, args.clock),
        "vocabulary over two processes of one thread, wall clock": split,
    }
    report("log_probs", tables, args.json)


if __name__ == "__main__":
    main()
