"""Log-probs and entropy from logits, forward and backward. `python -m tests.benchmarks.bench_log_probs`.

Peak memory is what operations allocate beside the logits, counted exactly (`PeakStorage`), the logits' gradient
included, in units of the logits. Competitors, restated here: log_softmax of all logits, with the entropy and without.
The last table splits the vocabulary over two gloo processes of one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from miles.backends.training_utils.loss_hub.token_scores import score_tokens
from miles.backends.training_utils.parallel import SINGLE, GroupInfo
from tests.benchmarks.common import PeakStorage, interleaved, parser, report, time_rows

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
    size = logits.untyped_storage().nbytes()
    rows = []
    for name, scores in COMPETITORS.items():
        logits.grad = None
        with PeakStorage(logits, targets) as storage:
            forward_and_backward(scores, logits, targets)
        rows.append({"competitor": name, "logits MiB": size >> 20, "peak MiB": storage.peak >> 20})
        rows[-1]["peak / logits"] = storage.peak / size
    return rows


def times(num_tokens: int, vocab_size: int, dtype: torch.dtype, rounds: int, clock: str) -> list[dict]:
    """Time all competitors on the same logits."""
    logits, targets = inputs(num_tokens, vocab_size, dtype)
    competitors = {
        name: lambda scores=scores: forward_and_backward(scores, logits, targets)
        for name, scores in COMPETITORS.items()
    }
    return time_rows(interleaved(competitors, rounds, clock), ours="ours", tokens=num_tokens, vocabulary=vocab_size)


def _share(rank: int, world_size: int, directory: str, shape: tuple[int, int], rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    tp = GroupInfo(rank, world_size, dist.group.WORLD)
    whole, targets = inputs(*shape, torch.float32)
    share = whole.detach().chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    del whole
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        forward_and_backward(lambda *tensors: ours(*tensors, tp), share, targets)
        seconds.append(time.perf_counter() - start)
    share.grad = None
    with PeakStorage(share, targets) as storage:
        forward_and_backward(lambda *tensors: ours(*tensors, tp), share, targets)
    torch.save(
        [sorted(seconds[1:])[rounds // 2], storage.peak / share.untyped_storage().nbytes()], f"{directory}/{rank}"
    )
    dist.destroy_process_group()


def vocabulary_parallel(num_tokens: int, vocab_size: int, rounds: int, world_size: int = 2) -> list[dict]:
    """Time and measure each rank's part of a split vocabulary."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = (world_size, directory, (num_tokens, vocab_size), rounds)
        torch.multiprocessing.start_processes(_share, arguments, nprocs=world_size, start_method="fork")
        found = [torch.load(f"{directory}/{rank}") for rank in range(world_size)]
    return [
        {
            "rank": rank,
            "tokens": num_tokens,
            "vocabulary": vocab_size,
            "median ms": seconds * 1e3,
            "peak / share": peak,
        }
        for rank, (seconds, peak) in enumerate(found)
    ]


def main() -> None:
    """Print memory and times."""
    options = parser(__doc__.split("`")[0], rounds=3)
    options.add_argument("--tokens", type=int, default=8192, help="scored tokens (default: 8192)")
    options.add_argument("--vocabulary", type=int, default=32768, help="size of the vocabulary (default: 32768)")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the logits")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    eighth = max(args.tokens // 8, 1)
    split = vocabulary_parallel(eighth, args.vocabulary, args.rounds)  # before this process starts threads
    tables = {
        "peak memory beside the logits": memory(args.tokens, args.vocabulary, dtype),
        "time": times(args.tokens, args.vocabulary, dtype, args.rounds, args.clock),
        "vocabulary over two processes": split,
    }
    report("log_probs", tables, args.json)


if __name__ == "__main__":
    main()
