"""Options and settings shared by the fast suite."""

import pytest
import torch
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
