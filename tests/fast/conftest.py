"""Options and settings shared by the fast suite."""

import os
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, settings

from miles.backends.training_utils import parallel

# For runs that expect failures (tests/mutants.py): report the first example found, do not look for the smallest.
settings.register_profile("no-shrink", phases=[Phase.explicit, Phase.generate])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--snapshot-update",
        action="store_true",
        help="rewrite the committed loss snapshots from the present code instead of comparing with them",
    )


def pytest_configure() -> None:
    # Small tensors on a shared machine: more threads only contend.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_process():
    """No test inherits another's topology."""
    before = parallel._parallel_state
    parallel.set_parallel_state(parallel.ParallelState())
    yield
    parallel.set_parallel_state(before)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Later tests fork this process, and a lock that a thread holds at that moment stays locked in the fork."""
    before = threading.enumerate()
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left, f"the test leaves the threads {left}; let what starts them run in a fork (run_ranks)"
    assert not dist.is_initialized(), "the test leaves a process group; let what makes it run in a fork (run_ranks)"


@pytest.fixture
def bare_environment(tmp_path, monkeypatch):
    """Hide a person's W&B settings and account; return the folder where everything outside of a run's would go."""
    monkeypatch.setenv("WANDB_CACHE_DIR", "set so that it is put back: the package sets it")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(folder)
    return folder
