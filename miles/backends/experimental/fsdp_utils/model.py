"""The policy over FSDP2: the same weights on every process, then sharded."""

import torch
from torch.distributed.fsdp import fully_shard

from miles.backends.experimental.fsdp_utils.models.gpt import GPT
from miles.backends.experimental.fsdp_utils.parallel import FSDPWorld


def shard_model(model: GPT, world: FSDPWorld) -> GPT:
    """Shard the model over all processes in place, one unit per block and one for the rest, and return it."""
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh)
    return fully_shard(model, mesh=world.mesh)


@torch.no_grad()
def copy_full_weights(sharded: GPT, replica: GPT) -> None:
    """Gather every parameter of a sharded model into an unsharded one of the same shape; every rank calls this."""
    for source, target in zip(sharded.parameters(), replica.parameters(), strict=True):
        target.copy_(source.full_tensor())
