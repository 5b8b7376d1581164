"""The training command: arguments in, exit status out.

    0    trained
    1    stopped by an error of this package, or because training diverged
    2    stopped by something a person has to fix: one line says what
    130  stopped by Ctrl-C

Importing this module, and `--help`, need no torch.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from miles.utils.arguments import parse_args
from miles.utils.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR
from miles.utils.errors import RankError, UserError
from miles.utils.options import Options
from miles.utils.run_files import console_logging

EXIT_DIVERGED = 1
SECONDS_TO_TELL = 1.0


class Interrupt:
    """Ctrl-C as one KeyboardInterrupt: further ones, and those that come late, must not interrupt the closing summary.

    A launcher passes a Ctrl-C on to processes that the terminal has already told.

    Attributes:
        is_seen: Whether a person pressed Ctrl-C.
        is_closing: Whether the run has begun to tidy up; from then on nothing is raised.
    """

    def __init__(self) -> None:
        self.is_seen = False
        self.is_closing = False

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        # After a Ctrl-C the process is about to end, and no more of them are needed for that.
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.is_seen else self._previous)

    def start_closing(self) -> None:
        """Raise nothing from here on."""
        self.is_closing = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        is_first, self.is_seen = not self.is_seen, True
        if is_first and not self.is_closing:
            raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says and return the exit status (see the module's head).

    Args:
        argv: Arguments without the program's name; None takes the process's.
    """
    with Interrupt() as interrupt, console_logging(is_main=os.environ.get("RANK", "0") == "0"):
        try:
            args = parse_args(argv)
            return _train(args, interrupt)
        except BaseException as error:
            if interrupt.is_seen:
                return EXIT_INTERRUPTED
            if not isinstance(error, UserError):
                raise
            _print_error(error)
            return EXIT_USER_ERROR


def leave(status: int) -> NoReturn:
    """End the process with an exit status.

    One of several processes leaves out the interpreter's own tidying up. Threads of a gloo group may outlive the
    group, and where they do, it aborts a process that is done (status 134; seen in one of a dozen runs of torch 2.13).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(status)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _train(args: Options, interrupt: Interrupt) -> int:
    # Here, not at the top: both need torch.
    from miles.backends.training_utils.finite_checks import NonFiniteError
    from miles.training_loop import train

    try:
        train(args, on_closing=interrupt.start_closing)
    except NonFiniteError as error:
        _print_error(error)
        return EXIT_DIVERGED
    return EXIT_INTERRUPTED if interrupt.is_seen else 0


def _print_error(error: Exception) -> None:
    # All processes stop with the same message; one of each machine tells it, unless one alone has it. A launcher ends
    # all of them when the first is gone, so the others wait until it has been told.
    if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, RankError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_TELL)
