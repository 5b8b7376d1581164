"""The command: rollout dumps in, a table (and JSON, and a picture) out.

    0    reported
    2    stopped by something a person has to fix: one line says what

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
from typing import Any

from miles.tools.aggregation_report.options import build_report_parser, training_args
from miles.tools.figure_style import check_figure_path, require_matplotlib
from miles.utils.command_line import run_tool, tell
from miles.utils.errors import UserError
from miles.utils.misc import check_writable, write_whole
from miles.utils.options import Options

STDOUT = 1
"""The number that every process knows its standard output by."""

COMPLAINTS_TOLD = 10
"""Samples left out whose errors are printed; the JSON file has all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Report as the command line says and return the exit status.

    Args:
        argv: Arguments without the program's name; None takes the process's.
    """
    return run_tool(lambda: _report(build_report_parser().parse_args(argv)))


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


def _report_on_dumps(options: Namespace, args: Options) -> None:
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.tools.aggregation_report.dumps import find_dumps, read_dump
    from miles.tools.aggregation_report.report import describe, describe_files
    from miles.tools.aggregation_report.weights import longest_response, sample_weights

    paths = find_dumps(options.dumps)
    _check_replaced(options, paths)
    set_parallel_state(ParallelState())
    everything = [read_dump(args, path, skip_bad=options.skip_bad) for path in paths]
    skipped = [complaint for dump in everything for complaint in dump.complaints]
    _tell(skipped)
    dumps = [dump for dump in everything if dump.shard]
    if not dumps:
        _write_json(options, describe_files(everything))
        raise UserError(f"no sample is left: all {len(skipped)} of the dumps cannot be trained on, as said above")
    divisor = args.loss_aggregation_divisor or float(longest_response(dumps) or 1)
    samples = sample_weights(args, dumps, divisor=divisor)
    report = describe(args, everything, samples, divisor=divisor, top=options.top, right_above=options.right_above)
    _show(options, report)
    if options.plot is not None:
        from miles.tools.aggregation_report.figure import draw_weights
        from miles.tools.figure_style import save_figure

        save_figure(draw_weights(samples, divisor=divisor), options.plot)


def _check_outputs(options: Namespace) -> None:
    """Check that the files of the report can be written, before anything is computed for them."""
    if options.plot is not None:
        check_figure_path(options.plot)
        require_matplotlib()
    if options.json is not None:
        check_writable(options.json, what=f"--json {options.json}", example="report.json")


def _check_replaced(options: Namespace, dumps: Sequence[Path]) -> None:
    """Check that no file of the report would replace another, or a dump."""
    if options.json is not None and options.plot is not None and _is_same_file(options.json, options.plot):
        raise UserError(f"--json and --plot are both {options.plot}; name two files")
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and any(_is_same_file(path, dump) for dump in dumps):
            raise UserError(f"{option} {path} is one of the dumps, which it would replace; name another file")


def _is_same_file(one: Path, other: Path) -> bool:
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _show(options: Namespace, report: dict[str, Any]) -> None:
    """Print the table and write the JSON file; where that is the standard output, the JSON takes the table's place."""
    from miles.tools.aggregation_report.table import render

    if not _is_stdout(options.json):
        print(render(report), end="")
    _write_json(options, report)


def _write_json(options: Namespace, report: dict[str, Any]) -> None:
    if options.json is None:
        return
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if _is_stdout(options.json):
        print(text, end="")
        return
    try:
        write_whole(options.json, text.encode())
    except OSError as error:
        raise UserError(f"--json {options.json} cannot be written: {error.strerror}; name another file") from error


def _is_stdout(path: Path | None) -> bool:
    """Whether a file is the process's standard output, as /dev/stdout is."""
    try:
        return path is not None and os.path.samestat(path.stat(), os.fstat(STDOUT))
    except OSError:  # there is no such file yet, or no standard output
        return False


def _tell(complaints: Sequence[str]) -> None:
    """Print the first of the samples that were left out, and how many there are."""
    for complaint in complaints[:COMPLAINTS_TOLD]:
        tell(f"left out: {complaint}")
    if complaints:
        more = len(complaints) - COMPLAINTS_TOLD
        noun = "sample" if len(complaints) == 1 else "samples"
        tell(f"left out {len(complaints)} {noun}" + f", {more} more than shown" * (more > 0))


if __name__ == "__main__":
    sys.exit(main())
