"""How the commands of this package end."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TextIO

from miles.utils.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
BASE_PACKAGES = ("torch", "numpy", "yaml", "tqdm")
"""What the package installs with itself, by the names that they are imported under."""


def run_tool(work: Callable[[], None]) -> int:
    """Do a tool's work, then print what it has printed, and return the exit status of its process.

    Printing comes last, so that a standard output that is closed, full or no longer read costs nothing else.

    Args:
        work: Prints what a person gets to see.

    Returns:
        0, also where nobody reads to the end; 2 after a `UserError`, which is told in one line, without a package
        that this one installs with itself, or where the standard output cannot be written; 130 after Ctrl-C.
    """
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            status = _status_of(work)
    finally:  # `--help` leaves through SystemExit
        unprinted = _print_last(printed.getvalue())
    return status or unprinted


def tell(text: str) -> None:
    """Print a line on the standard error stream; where that cannot be written, nothing is left to say so."""
    if sys.stderr is None:  # it was closed before the process began
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Send what is left in a stream's buffer nowhere, so that it does not fail once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _status_of(work: Callable[[], None]) -> int:
    try:
        work()
    except UserError as error:
        tell(f"error: {error}")
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if error.name not in BASE_PACKAGES:
            raise
        tell(f"error: {error.name} is not installed; in this project's folder: pip install -e .")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _print_last(text: str) -> int:
    """Print a text on the standard output, if there is one, and return the exit status."""
    if sys.stdout is None or not text:  # None: it was closed before the process began
        return 0
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the terminal cannot show
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return 0
        tell(f"error: the standard output cannot be written: {error.strerror}")
        return EXIT_USER_ERROR
    return 0
