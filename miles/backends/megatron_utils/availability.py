"""Whether Megatron-Core is there, in a version that the tests have run."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import torch

from miles.utils.errors import UserError

TESTED = ("0.16", "0.17")
"""From the first, up to but without the second. Older releases scale a loss differently; see `loss.py`."""

INSTALL = "pip install 'miles[megatron]', or pip install -e '.[megatron]' in a clone"


def check_megatron() -> None:
    """Check that a tested megatron-core is installed, without importing it.

    Raises:
        UserError: it is missing, or of another version; the message says the command that fixes it.
    """
    wanted = f"megatron-core>={TESTED[0]},<{TESTED[1]}"
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise UserError(f"--train-backend megatron needs {wanted}, which is not installed; run: {INSTALL}") from None
    if not _numbers(TESTED[0]) <= _numbers(version) < _numbers(TESTED[1]):
        raise UserError(f"--train-backend megatron needs {wanted}, and {version} is installed; run: {INSTALL}")


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


@contextmanager
def quiet_import() -> Iterator[None]:
    """Import Megatron-Core without the pages about accelerators that a machine without a GPU does without."""
    with warnings.catch_warnings():
        if not torch.cuda.is_available():
            warnings.simplefilter("ignore")
        yield
