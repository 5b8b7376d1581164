"""How the commands of this package end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from miles.utils.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def run_tool(work: Callable[[], None]) -> int:
    """Do a tool's work and return the exit status of its process.

    Args:
        work: Prints what a person gets to see.

    Returns:
        0; 2 after a `UserError`, which is told in one line; 130 after Ctrl-C.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the terminal cannot show
    try:
        work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
