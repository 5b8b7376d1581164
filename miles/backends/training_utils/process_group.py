"""The processes of a run, on CPUs (gloo) or GPUs (nccl), before a backend arranges them on its axes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from miles.utils.errors import UserError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process's place in the run.

    Attributes:
        rank: Global rank; rank 0 writes files and talks to the person.
        size: Number of processes.
        device: Where this process's tensors live.
    """

    rank: int
    size: int
    device: torch.device


def choose_device() -> torch.device:
    """Return this process's GPU where torch sees one, else the CPU.

    Raises:
        UserError: more processes were started on this machine than it has GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_processes, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if num_processes > num_gpus:
        raise UserError(
            f"{num_processes} processes on a machine where torch sees {num_gpus} GPUs, and each needs its own; "
            f"start at most {num_gpus} (torchrun --nproc-per-node {num_gpus}), or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES='') to train on the CPU"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def init_process_group(device: torch.device) -> None:
    """Join the group that torchrun describes in the environment; started by hand, the process is a group of one.

    With GPUs the group carries both backends, so that counts and objects on the CPU need no second group.
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if all(name in os.environ for name in LAUNCHER_VARIABLES):
        dist.init_process_group(backend, init_method="env://", timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)


@contextmanager
def process_group() -> Iterator[World]:
    """Open the process group of a run and leave it on the way out.

    Yields:
        This process's place in it.

    Raises:
        UserError: see `choose_device`.
    """
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(device)
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()
