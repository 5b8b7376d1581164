"""The command: rollout dumps in, a table (and JSON, and a picture) out.

    0    reported
    2    stopped by something a person has to mend: one line says what

`--help` needs no torch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from miles.tools.aggregation_report.options import build_report_parser, training_args
from miles.tools.figure_style import check_figure_path, require_matplotlib
from miles.utils.command_line import run_tool
from miles.utils.errors import UserError
from miles.utils.misc import write_whole

COMPLAINTS_TOLD = 10
"""Samples left out whose errors are printed; the JSON file has all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Report as the command line says and return the exit status.

    Args:
        argv: Arguments without the program's name; None takes the process's.
    """
    options = build_report_parser().parse_args(argv)
    return run_tool(lambda: _report(options))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Work on one thread and without garbage collection, for the time that the context lasts.

    Micro-batches are too small for several threads, which would wait for one another; and the collector would walk
    through all tokens of the dumps again and again. Either doubles the time.
    """
    import torch

    was_enabled, num_threads = gc.isenabled(), torch.get_num_threads()
    gc.disable()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        if was_enabled:
            gc.enable()


def _report(options: Namespace) -> None:
    args = training_args(options)
    _check_outputs(options)
    # From here on with torch, which takes a second to import.
    with _undisturbed():
        _report_on_dumps(options, args)


def _report_on_dumps(options: Namespace, args: Namespace) -> None:
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.tools.aggregation_report.dumps import find_dumps, read_dump
    from miles.tools.aggregation_report.report import describe
    from miles.tools.aggregation_report.table import render
    from miles.tools.aggregation_report.weights import longest_response, sample_weights

    set_parallel_state(ParallelState())
    everything = [read_dump(args, path, skip_bad=options.skip_bad) for path in find_dumps(options.dumps)]
    skipped = [complaint for dump in everything for complaint in dump.complaints]
    _tell(skipped)
    dumps = [dump for dump in everything if dump.shard]
    if not dumps:
        raise UserError(f"no sample is left: all {len(skipped)} of the dumps cannot be trained on, as said above")
    divisor = args.loss_aggregation_divisor or float(longest_response(dumps) or 1)
    samples = sample_weights(args, dumps, divisor=divisor)
    report = describe(
        args, dumps, samples, divisor=divisor, top=options.top, right_above=options.right_above, skipped=skipped
    )
    print(render(report), end="")
    if options.json is not None:
        _write(options.json, json.dumps(report, indent=2, allow_nan=False) + "\n")
    if options.plot is not None:
        from miles.tools.aggregation_report.figure import draw_weights
        from miles.tools.figure_style import save_figure

        save_figure(draw_weights(samples, divisor=divisor), options.plot)


def _check_outputs(options: Namespace) -> None:
    """Check that the files of the report can be written, before anything is computed for them."""
    if options.plot is not None:
        check_figure_path(options.plot)
        require_matplotlib()
    path = options.json
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"--json {path} is a folder; name a file in it, such as {path / 'report.json'}")
    if path.resolve() in (Path(text).resolve() for text in options.dumps):
        raise UserError(f"--json {path} is one of the dumps, which it would replace; name another file")
    if not path.parent.is_dir():
        raise UserError(f"--json {path}: {path.parent} is not a folder; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--json {path}: no permission to write into {path.parent}; name another folder")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}; name another file") from error


def _tell(complaints: Sequence[str]) -> None:
    """Print the first of the samples that were left out, and how many there are."""
    for complaint in complaints[:COMPLAINTS_TOLD]:
        print(f"left out: {complaint}", file=sys.stderr)
    if complaints:
        more = len(complaints) - COMPLAINTS_TOLD
        noun = "sample" if len(complaints) == 1 else "samples"
        print(f"left out {len(complaints)} {noun}" + f", {more} more than shown" * (more > 0), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
