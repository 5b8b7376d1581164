"""The policy over FSDP2: the same weights on every process, then sharded."""

from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from miles.backends.experimental.fsdp_utils.models.gpt import GPT
from miles.backends.experimental.fsdp_utils.parallel import FSDPWorld
from miles.utils.errors import UserError

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def shard_model(model: GPT, world: FSDPWorld) -> GPT:
    """Shard the model over all processes in place, one unit per block and one for the rest, and return it."""
    for block in model.blocks:
        shard_unit(block, world)
    return shard_unit(model, world)


def shard_unit(module: ModuleT, world: FSDPWorld) -> ModuleT:
    """Make one FSDP2 unit of the parameters that no inner unit holds; its gradients become the mean over processes.

    The mean is asked for as a sum and a division: gloo of torch 2.7 and 2.8, asked for a mean, returns the sum.
    """
    fully_shard(module, mesh=world.mesh)
    if isinstance(module, FSDPModule) and hasattr(module, "set_force_sum_reduction_for_comms"):  # torch 2.8 and newer
        module.set_force_sum_reduction_for_comms(True)
    return module


def check_gradients_are_averaged(world: FSDPWorld) -> None:
    """Run one tiny backward pass and compare the gradient with the mean that the loss layer's factor counts on.

    A sum in its place would train without an error, with every gradient `world.size` times too large.

    Raises:
        UserError: this torch averages wrongly, or cannot run FSDP2 on this device at all.
    """
    probe = torch.nn.Linear(1, 1, bias=False, device=world.device)
    needed = f"torch {torch.__version__} cannot train on {world.size} {world.device.type} processes: "
    try:
        shard_unit(probe, world)(torch.full((1, 1), world.rank + 1.0, device=world.device)).sum().backward()
        gradient = gather_whole(probe.weight.grad).item()
    except AttributeError as error:
        raise UserError(f"{needed}FSDP2 fails with {error!r}; install torch 2.8 or newer") from error
    mean = (world.size + 1) / 2
    if abs(gradient - mean) > 1e-3 * mean:
        raise UserError(f"{needed}FSDP2 gives a gradient of {gradient} for {mean}; install torch 2.8 or newer")


def gather_whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Gather a tensor that FSDP2 shards; every rank calls this."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


@torch.no_grad()
def copy_full_weights(sharded: GPT, replica: GPT) -> None:
    """Gather every parameter of a sharded model into an unsharded one of the same shape; every rank calls this."""
    for source, target in zip(sharded.parameters(), replica.parameters(), strict=True):
        target.copy_(gather_whole(source))
