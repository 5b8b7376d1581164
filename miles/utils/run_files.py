"""What a run leaves in its folder beside its metrics: the folder itself, its arguments, its log."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.utils.errors import UserError
from miles.utils.options import Options

METRICS_NAME = "metrics.jsonl"
ARGUMENTS_NAME = "args.json"
LOG_NAME = "train.log"


def make_output_dir(args: Options, *, now: float) -> Path:
    """Create and return the run's folder: `args.output_dir`, else `runs/<date>-<time>-<mode>`, made anew.

    Args:
        args: The resolved arguments.
        now: Unix time in seconds.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        if args.output_dir is not None:
            path = Path(args.output_dir)
            path.mkdir(parents=True, exist_ok=True)
            return path
        stem = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{args.loss_aggregation}"
        Path("runs").mkdir(exist_ok=True)
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            path = Path("runs") / f"{stem}{suffix}"
            if not path.exists():
                path.mkdir()
                return path
    except OSError as error:
        raise UserError(f"cannot make the output folder (--output-dir): {error}") from error
    raise UserError(f"runs/{stem} and its numbered variants all exist; name a folder with --output-dir")


def arguments_as_json(args: Options) -> str:
    """Return the resolved arguments as JSON, sorted by name; what JSON has no form for is written as `str` does."""
    return json.dumps(vars(args), indent=2, sort_keys=True, default=str)


def write_arguments(directory: Path, args: Options) -> None:
    """Write the resolved arguments (see `arguments_as_json`).

    Raises:
        UserError: they cannot be written.
    """
    path = directory / ARGUMENTS_NAME
    try:
        path.write_text(f"{arguments_as_json(args)}\n")
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path} (--output-dir): {error.strerror}; name a folder that can be written")


@contextmanager
def console_logging(*, is_main: bool) -> Iterator[None]:
    """Show this package's log on stderr: everything of the main process, warnings of the others."""
    package = logging.getLogger("miles")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if is_main else logging.WARNING)
    level = package.level
    package.setLevel(logging.INFO)
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


@contextmanager
def file_logging(path: Path) -> Iterator[None]:
    """Append this package's log to a file as well.

    Raises:
        UserError: it cannot be written.
    """
    try:
        handler = logging.FileHandler(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("miles")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        handler.close()
