"""No test of the layer inherits another's topology."""

import pytest

from miles.backends.training_utils import parallel


@pytest.fixture(autouse=True)
def _one_process():
    before = parallel._parallel_state
    parallel.set_parallel_state(parallel.ParallelState())
    yield
    parallel.set_parallel_state(before)
