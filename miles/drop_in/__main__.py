"""The command line: `python -m miles.drop_in CHECKOUT [--apply | --revert | --check] [--force] [--skip SEAM,...]`."""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.drop_in.commands import Detect

_DESCRIPTION = """\
Put the modes of --loss-aggregation into an existing Miles or slime checkout, as a small change to read and commit.
Without an option it prints what it would do: the host found, each seam with file and line, and the diff."""

_EPILOG = """\
exit status: 0 done; 2 something for you to fix, in one message, with nothing written.
--check: 0 in, whole and current; 1 not in; 2 in part, damaged or of another version."""


def main(argv: Sequence[str] | None = None, *, detect: Detect | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: the arguments; those of the process by default.
        detect: finds the host; by default the one that knows the registered hosts.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.force and not (args.apply or args.revert):
        parser.error("--force goes with --apply or --revert, which write files")
    if args.skip and (args.revert or args.check):
        parser.error("--skip goes with --apply, or with no action; --revert and --check take it from the record")
    if importlib.util.find_spec("libcst") is None:
        return _fail(
            "the edits are made with LibCST, which is not installed; in this project's folder: "
            'pip install -e ".[drop-in]"'
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a diff may hold what the terminal cannot show
    try:
        return _run(args, detect)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("stopped; --check says whether the drop-in is in", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miles.drop_in",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", metavar="CHECKOUT", help="the folder of the checkout")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--apply", action="store_true", help="write it, all or nothing")
    action.add_argument("--revert", action="store_true", help="take it out again, byte for byte")
    action.add_argument("--check", action="store_true", help="say whether it is in, whole and current")
    parser.add_argument("--force", action="store_true", help="write into files with uncommitted changes too")
    parser.add_argument(
        "--skip",
        metavar="SEAM[,SEAM...]",
        type=lambda names: [name.strip() for name in names.split(",")],
        action="extend",
        default=[],
        help="leave these seams to you, by their names in the plan; --apply keeps them in the record",
    )
    return parser


def _run(args: argparse.Namespace, detect: Detect | None) -> int:
    # Here, since these need LibCST, and the command line says so where it is missing.
    from miles.drop_in import commands, report
    from miles.drop_in.checkout import Checkout

    checkout = Checkout(args.checkout)
    if detect is None:
        from miles.drop_in.hosts import detect_host

        detect = detect_host
    if args.revert:
        print(report.reverted(checkout, commands.revert(checkout, detect, force=args.force)))
        return 0
    if args.check:
        state, words = commands.check(checkout, detect)
        print(f"the drop-in in {checkout.root} is {words}")
        return int(state)
    prospect = commands.look(checkout, detect, skip=args.skip)
    if args.apply:
        commands.apply(prospect, force=args.force)
        print(report.applied(prospect))
    else:
        print(report.planned(prospect, commands.uncommitted_note(prospect)))
    return 0


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
