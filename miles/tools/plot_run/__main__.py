"""The command line: `python -m miles.tools.plot_run DIR [DIR ...] [--output FILE.png] [--smooth N]`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from miles.tools.figure_style import check_figure_path, require_matplotlib, save_figure
from miles.utils.command_line import run_tool
from miles.utils.errors import UserError
from miles.utils.options.declare import ManualHelpFormatter
from miles.utils.run_files import ARGUMENTS_NAME, METRICS_NAME, console_logging

_DESCRIPTION = (
    "Draw reward, response length, loss and gradient norm of training runs into one picture. Runs that differ only in "
    "their seeds and folders share a colour: a thin line each, their mean bold. A run may still be going on."
)
_EPILOG = "exit status: 0 drawn; 2 something for you to fix, one line says what."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: The arguments; those of the process by default.
    """
    args = _parser().parse_args(argv)
    with console_logging(is_main=True):
        return run_tool(lambda: _plot(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miles.tools.plot_run",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=ManualHelpFormatter,
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="a run's folder (its --output-dir)")
    parser.add_argument("--output", metavar="FILE.png", default="runs.png", help="the picture to write")
    parser.add_argument(
        "--smooth",
        type=int,
        default=1,
        help="each point is the mean of what was logged in so many optimizer steps up to its own; 1 draws all",
    )
    return parser


def _plot(args: argparse.Namespace) -> None:
    if args.smooth < 1:
        raise UserError(f"--smooth must be at least 1, got {args.smooth}")
    require_matplotlib()
    from miles.tools.plot_run.figure import draw_runs
    from miles.tools.plot_run.runs import group_runs, read_runs
    from miles.tools.plot_run.table import describe_groups

    output = check_figure_path(args.output)
    _refuse_to_overwrite(output, args.directories)
    groups = group_runs(read_runs(args.directories))
    save_figure(draw_runs(groups, smooth=args.smooth), output)
    print(describe_groups(groups))
    print(f"figure: {output}")


def _refuse_to_overwrite(output: Path, directories: Sequence[Path]) -> None:
    for directory in directories:
        for name in (METRICS_NAME, ARGUMENTS_NAME):
            if os.path.realpath(output) == os.path.realpath(directory / name):
                raise UserError(f"--output {output} is {directory / name}, which it would replace; name another file")


if __name__ == "__main__":
    sys.exit(main())
