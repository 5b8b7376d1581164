"""The aggregation report on 100,000 samples of real lengths. `python -m tests.benchmarks.bench_aggregation_report`.

Each stage once, in CPU seconds, which a busy machine disturbs less; and what of them is reading the file.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch

from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
from miles.rollout.debug_data import read_dump_rows, save_rollout_dump
from miles.tools.aggregation_report.dumps import read_dump
from miles.tools.aggregation_report.options import build_report_parser, training_args
from miles.tools.aggregation_report.report import describe
from miles.tools.aggregation_report.table import render
from miles.tools.aggregation_report.weights import longest_response, sample_weights
from tests.benchmarks.common import Stages, parser, positive, report
from tests.fast.length_mix import mixed_samples


def seconds_of_stages(path: Path) -> dict[str, float]:
    """Return the CPU seconds of each stage of the command on one dump; reading is a part of "read and cut"."""
    stages = Stages()
    args = training_args(build_report_parser().parse_args([str(path)]))
    stages.run("read alone", lambda: len(read_dump_rows(path)))
    dump = stages.run("read and cut", lambda: read_dump(args, path, skip_bad=False))
    divisor = float(longest_response([dump]))
    samples = stages.run("weights", lambda: sample_weights(args, [dump], divisor=divisor))
    described = stages.run(
        "numbers", lambda: describe(args, [dump], samples, divisor=divisor, top=5, right_above=None)
    )
    stages.run("text", lambda: render(described))
    stages.seconds["total"] = sum(stages.seconds.values()) - stages.seconds["read alone"]
    return stages.seconds


def main() -> None:
    """Print the stages."""
    options = parser(__doc__)
    options.add_argument("--samples", type=positive, default=100_000, help="samples of the dump (default: 100000)")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    set_parallel_state(ParallelState())
    gc.disable()  # as the command does
    with tempfile.TemporaryDirectory() as folder:
        samples = mixed_samples(args.samples)
        num_tokens = sum(sample.response_length for sample in samples)
        path = save_rollout_dump(f"{folder}/rollouts.pt", 0, samples)
        del samples
        rows = [{"stage": name, "CPU seconds": round(value, 2)} for name, value in seconds_of_stages(path).items()]
    report("aggregation report", {f"{args.samples} samples, {num_tokens / 1e6:.1f}M response tokens": rows}, args.json)


if __name__ == "__main__":
    main()
