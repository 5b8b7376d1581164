"""Reducers: build once, reduce eight metrics, one backward. `python -m tests.benchmarks.bench_reducers`.

Competitors, each restated here: the loop over samples of host trainers; a padded masked mean as trainers with padded
batches do it; and the limit, one `torch.dot` with weights that are there already, whose backward is one multiply.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
from tests.benchmarks.common import interleaved, parser, positive, report, time_rows

NUM_METRICS = 8
SIZES = ((8, 4096), (64, 1024), (512, 512))
LIMIT_SIZES = ((8, 16384), (8, 65536))
PROMPT_LENGTH = 100

Reducer = Callable[[torch.Tensor], torch.Tensor]


def loop_reducer(lengths: Sequence[int], masks: Sequence[torch.Tensor]) -> Reducer:
    """Five small kernels for each sample of each metric."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        total = 0
        for row, mask in zip(values.split(lengths), masks, strict=True):
            total = total + (row * mask).sum() / mask.sum().clamp(min=1)
        return total

    return reduce


def padded_reducer(lengths: Sequence[int], masks: Sequence[torch.Tensor]) -> Reducer:
    """A rectangle of the longest row's width; values come packed and are laid out in it for each metric."""
    mask = pad_sequence(list(masks), batch_first=True).float()
    counts = mask.sum(-1).clamp(min=1)

    def reduce(values: torch.Tensor) -> torch.Tensor:
        padded = pad_sequence(values.split(lengths), batch_first=True)
        return ((padded * mask).sum(-1) / counts).sum()

    return reduce


def rectangle_reducer(mask: torch.Tensor) -> Reducer:
    """The same where values lie in the rectangle already, as they do in trainers that never pack."""
    counts = mask.sum(-1).clamp(min=1)
    return lambda padded: ((padded * mask).sum(-1) / counts).sum()


def our_reducer(lengths: Sequence[int], masks: Sequence[torch.Tensor]) -> Reducer:
    """The package's, through its front door."""
    return get_sum_of_sample_mean([length + PROMPT_LENGTH for length in lengths], lengths, masks)


def work(build: Callable[[], Reducer], metrics: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return build + metrics + backward of the first; metrics but the first are detached, as logged ones are."""

    def run() -> None:
        reducer = build()
        metrics[0].grad = None
        loss, *_ = [reducer(values) for values in metrics]
        loss.backward()

    return run


def rows_of(num_rows: int, longest: int, *, spread: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return int64 masks, a tenth of the tokens masked; lengths from longest / spread to longest."""
    shares = torch.linspace(1 / spread, 1, num_rows) if spread > 1 else torch.ones(num_rows)
    lengths = (shares * longest).round().int().tolist()
    return [(torch.rand(length, generator=generator) < 0.9).to(torch.int64) for length in lengths]


def metrics_of(*shape: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return eight metrics, the first of which wants a gradient."""
    metrics = [torch.randn(*shape, generator=generator) for _ in range(NUM_METRICS)]
    metrics[0].requires_grad_()
    return metrics


def times(num_rows: int, longest: int, spread: int, rounds: int, clock: str = "wall") -> list[dict]:
    """Time all competitors on the same rows."""
    generator = torch.Generator().manual_seed(0)
    masks = rows_of(num_rows, longest, spread=spread, generator=generator)
    lengths = [mask.numel() for mask in masks]
    metrics = metrics_of(sum(lengths), generator=generator)
    rectangle = metrics_of(num_rows, max(lengths), generator=generator)
    weights = torch.cat([mask / mask.sum().clamp(min=1) for mask in masks])
    competitors = {
        "ours": work(lambda: our_reducer(lengths, masks), metrics),
        "loop": work(lambda: loop_reducer(lengths, masks), metrics),
        "padded": work(lambda: padded_reducer(lengths, masks), metrics),
        "never packed": work(lambda: rectangle_reducer(pad_sequence(masks, batch_first=True).float()), rectangle),
        "limit": work(lambda: lambda values: torch.dot(values, weights), metrics),
    }
    if sum(lengths) > 300_000:
        del competitors["loop"], competitors["padded"]
    shape = {"rows": num_rows, "longest": longest, "spread": f"1:{spread}", "tokens": sum(lengths)}
    return time_rows(interleaved(competitors, rounds, clock), ours="ours", **shape)


def one_metric(num_rows: int, longest: int, rounds: int, clock: str = "wall") -> list[dict]:
    """Time one metric and its backward with a reducer that is built already, against the limit."""
    generator = torch.Generator().manual_seed(0)
    masks = rows_of(num_rows, longest, spread=1, generator=generator)
    lengths = [mask.numel() for mask in masks]
    values = torch.randn(sum(lengths), generator=generator)
    leaf = values.clone().requires_grad_()
    reducer, weights = our_reducer(lengths, masks), torch.rand(sum(lengths))
    rows = []
    for name, argument in (("forward", values), ("with backward", leaf)):

        def run(reduce: Reducer, argument: torch.Tensor = argument) -> None:
            result = reduce(argument)
            if result.requires_grad:
                argument.grad = None
                result.backward()

        competitors = {
            "ours": lambda run=run: run(reducer),
            "limit": lambda run=run: run(lambda x: torch.dot(x, weights)),
        }
        rows += time_rows(interleaved(competitors, 4 * rounds, clock), ours="ours", tokens=sum(lengths), part=name)
    return rows


def errors(num_rows: int, longest: int, batches: int) -> list[dict]:
    """Return each competitor's median error against float64 over random batches, relative to the sum of sizes."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list[float]] = {"ours": [], "loop": [], "padded": [], "limit": []}
    for _ in range(batches):
        masks = rows_of(num_rows, longest, spread=16, generator=generator)
        lengths = [mask.numel() for mask in masks]
        values = torch.randn(sum(lengths), generator=generator)
        rows = list(zip(values.double().split(lengths), masks, strict=True))
        exact = sum((row * mask).sum() / mask.sum().clamp(min=1) for row, mask in rows)
        size = sum((row.abs() * mask).sum() / mask.sum().clamp(min=1) for row, mask in rows)
        weights = torch.cat([mask / mask.sum().clamp(min=1) for mask in masks])
        results = {
            "ours": our_reducer(lengths, masks)(values),
            "loop": loop_reducer(lengths, masks)(values),
            "padded": padded_reducer(lengths, masks)(values),
            "limit": torch.dot(values, weights),
        }
        for name, result in results.items():
            found[name].append(float((result.double() - exact).abs() / size))
    median = {name: statistics.median(values) for name, values in found.items()}
    return [
        {
            "rows": num_rows,
            "longest": longest,
            "competitor": name,
            "median error": error,
            "/ loop": error / median["loop"],
        }
        for name, error in median.items()
    ]


def main() -> None:
    """Print times and errors of all sizes."""
    options = parser(__doc__, rounds=7, has_clock=True)
    options.add_argument("--batches", type=positive, default=100, help="random batches of the error (default: 100)")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    set_parallel_state(ParallelState())
    tables = {
        "build + 8 metrics + backward of one": [
            row
            for num_rows, longest in (*SIZES, *LIMIT_SIZES)
            for spread in (1, 16)
            for row in times(num_rows, longest, spread, args.rounds, args.clock)
        ],
        "one metric": [
            row for num_rows, longest in LIMIT_SIZES for row in one_metric(num_rows, longest, args.rounds, args.clock)
        ],
        "error against float64": [
            row for num_rows, longest in SIZES[:2] for row in errors(num_rows, longest, args.batches)
        ],
    }
    report("reducers", tables, args.json)


if __name__ == "__main__":
    main()
