"""FSDP2's one axis, data parallel over all processes of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.backends.training_utils.process_group import World, process_group


@dataclass(frozen=True)
class FSDPWorld(World):
    """This process's place in the run, and the mesh that FSDP2 shards over.

    Attributes:
        mesh: One axis, `dp`, over every process.
    """

    mesh: DeviceMesh


def create_fsdp_parallel_state(world: World) -> FSDPWorld:
    """Build the mesh over the initialised process group and install the `ParallelState` that the loss layer reads."""
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))
    group = mesh.get_group("dp")
    # The group answers for CPU tensors too, so it is also the one for objects.
    dp = GroupInfo(rank=world.rank, size=world.size, group=group, gloo_group=group)
    set_parallel_state(ParallelState(intra_dp=dp, intra_dp_cp=dp))
    return FSDPWorld(rank=world.rank, size=world.size, device=world.device, mesh=mesh)


@contextmanager
def fsdp_world() -> Iterator[FSDPWorld]:
    """Open the process group, mesh and parallel state of a run, and leave the group on the way out.

    Yields:
        This process's `FSDPWorld`.

    Raises:
        UserError: see `choose_device`.
    """
    with process_group() as world:
        yield create_fsdp_parallel_state(world)
