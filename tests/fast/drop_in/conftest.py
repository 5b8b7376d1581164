"""The toy host, committed, and the command line over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="the drop-in tool needs LibCST")

from miles.drop_in.__main__ import main
from tests.fast.drop_in.toy import ToyHost, commit_all, detecting, make_toy


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A toy host in a repository of its own, without changes."""
    folder = make_toy(tmp_path)
    commit_all(folder)
    return folder


@pytest.fixture
def drop_in() -> Callable[..., int]:
    """The command line, for toy hosts."""

    def run(folder: Path, *options: str, host: ToyHost | None = None) -> int:
        return main([str(folder), *options], detect=detecting(host or ToyHost()))

    return run
