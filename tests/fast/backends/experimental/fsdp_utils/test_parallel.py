"""Process group, mesh and parallel state of an FSDP2 run."""

import pytest
import torch
import torch.distributed as dist

from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.backends.training_utils.parallel import get_parallel_state
from miles.backends.training_utils.process_group import choose_device
from miles.utils.errors import UserError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks


def _describe_world():
    with fsdp_world() as world:
        dp = get_parallel_state().intra_dp
        assert get_parallel_state().intra_dp_cp is dp
        total = dp.all_reduce(torch.tensor(dp.rank + 1)).item()
        answer = (world.rank, world.size, dp.rank, dp.size, world.mesh.size(), world.device.type, total)
    return answer, dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_process_stands_on_one_data_parallel_axis(world_size):
    total = sum(range(1, world_size + 1))
    assert run_ranks(_describe_world, world_size) == [
        ((rank, world_size, rank, world_size, world_size, "cpu", total), False) for rank in range(world_size)
    ]


def test_the_group_is_left_when_the_run_fails():
    def fail():
        with pytest.raises(KeyError), fsdp_world():
            raise KeyError
        return dist.is_initialized()

    assert run_ranks(fail, 1) == [False]


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match=r"2 processes .* torch sees 1 GPUs.*--nproc-per-node 1\).*CUDA_VISIBLE_DEVICES"
    ):
        choose_device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device() == torch.device("cuda", 1)
