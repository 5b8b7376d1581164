"""Building the policy: the same weights on every process, then sharded."""

from argparse import Namespace

import torch
from torch.distributed.fsdp import fully_shard

from miles.backends.experimental.fsdp_utils.models.gpt import GPT, GPTConfig
from miles.backends.experimental.fsdp_utils.parallel import FSDPWorld

ARCHITECTURE_ARGUMENTS = ("hidden_size", "num_layers", "num_attention_heads", "max_position_embeddings")


def describe_architecture(args: Namespace, vocab_size: int) -> dict[str, int]:
    """Return, by name, the numbers that decide the shapes of the weights."""
    return {**{name: getattr(args, name) for name in ARCHITECTURE_ARGUMENTS}, "vocab_size": vocab_size}


def build_model(args: Namespace, vocab_size: int, device: torch.device) -> GPT:
    """Return the unsharded model with the weights that `args.seed` draws, the same on every process."""
    config = GPTConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        max_position_embeddings=args.max_position_embeddings,
    )
    return GPT(config, seed=args.seed).to(device)


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
