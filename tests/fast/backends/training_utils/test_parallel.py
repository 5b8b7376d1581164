"""The state of a process: what it is without one installed, and layouts that it refuses."""

import pytest
import torch.distributed as dist

from miles.backends.training_utils import parallel
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, get_parallel_state


def test_without_one_a_lone_process_is_a_world_of_one(monkeypatch):
    monkeypatch.setattr(parallel, "_parallel_state", None)
    assert get_parallel_state() == ParallelState()


def test_without_one_a_process_among_others_is_refused(monkeypatch):
    monkeypatch.setattr(parallel, "_parallel_state", None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(RuntimeError, match=r"no parallel state in this process, one of 3; call set_parallel_state"):
        get_parallel_state()


@pytest.mark.parametrize("kind", [None, "p2p", "all_gather", ["p2p", "all_gather"]])
def test_exchanges_that_keep_zigzag_slices(kind):
    assert ParallelState(cp=GroupInfo(1, 2), cp_comm_type=kind).cp_comm_type == kind


@pytest.mark.parametrize("kind", ["a2a", ["p2p", "a2a"]])
def test_contiguous_slices_are_refused_unless_there_is_one_rank(kind):
    assert ParallelState(cp_comm_type=kind).cp.size == 1
    with pytest.raises(ValueError, match=r"contiguous slice, .* zigzag slices; use 'p2p'"):
        ParallelState(cp=GroupInfo(0, 2), cp_comm_type=kind)
