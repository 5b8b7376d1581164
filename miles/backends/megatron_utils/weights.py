"""The same weights in two shapes: the FSDP2 backend's `GPT`, and Megatron-Core's chunks, stages and tensor slices.

Rollout generation runs on a whole `GPT`, and a run starts from the weights that its seed draws there, so that both
backends train the same model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from miles.backends.experimental.fsdp_utils.models.gpt import GPT
from miles.backends.training_utils.parallel import GroupInfo

MEGATRON_TO_GPT = {
    "embedding.word_embeddings": "token_embedding",
    "embedding.position_embeddings": "position_embedding",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "output",
}
MEGATRON_TO_GPT_IN_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.proj",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.proj",
}
"""Modules by name."""

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
}
"""Where Transformer Engine's layers keep a block's two norms: inside the linear layer after them."""


def gpt_name(name: str, *, first_layer: int) -> str:
    """Return the `GPT` name of a Megatron parameter.

    Args:
        name: As in a chunk's `named_parameters`.
        first_layer: Number of the chunk's first layer in the whole model.
    """
    module, _, kind = name.rpartition(".")
    block = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if block is None:
        return f"{MEGATRON_TO_GPT[module]}.{kind}"
    prefix = f"blocks.{first_layer + int(block[1])}."
    for fused, norm in FUSED_NORMS.items():
        if block[2].startswith(fused):
            return prefix + norm + block[2].removeprefix(fused)
    module, _, kind = block[2].rpartition(".")
    return f"{prefix}{MEGATRON_TO_GPT_IN_BLOCK[module]}.{kind}"


def named_shards(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield each parameter of this rank's chunks with its `GPT` name."""
    for chunk in chunks:
        layers = chunk.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in chunk.named_parameters():
            yield gpt_name(name, first_layer=first_layer), parameter


def _split_dimension(parameter: torch.nn.Parameter) -> int | None:
    return getattr(parameter, "partition_dim", None) if getattr(parameter, "tensor_model_parallel", False) else None


@torch.no_grad()
def load_gpt_weights(model: GPT, chunks: Sequence[GPTModel], *, tp: GroupInfo) -> None:
    """Copy a whole model into this rank's chunks; vocabulary entries that are padding become zero."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, parameter in named_shards(chunks):
        whole, dimension = weights[name], _split_dimension(parameter)
        if dimension is not None:
            padding = parameter.size(dimension) * tp.size - whole.size(dimension)
            whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])]) if padding else whole
            whole = whole.chunk(tp.size, dim=dimension)[tp.rank]
        parameter.copy_(whole)


@torch.no_grad()
def gather_gpt_weights(chunks: Sequence[GPTModel], model: GPT, *, tp: GroupInfo, pp: GroupInfo) -> None:
    """Gather every rank's chunks into a whole model on every rank; a collective over the stages' tensor slices."""
    shards = {name: _gather_over_tp(parameter, tp) for name, parameter in named_shards(chunks)}
    owners: list[list[str]] = [[] for _ in range(pp.size)]
    dist.all_gather_object(owners, list(shards), group=pp.group)
    ranks = dist.get_process_group_ranks(pp.group)
    owner_of = {name: rank for rank, names in zip(ranks, owners, strict=True) for name in names}
    for name, target in model.named_parameters():
        # Padding of the vocabulary is at the end and stays behind.
        whole = shards[name][: target.size(0)].to(target.dtype) if name in shards else torch.empty_like(target)
        whole = whole.contiguous()
        dist.broadcast(whole, src=owner_of[name], group=pp.group)
        target.copy_(whole)


def _gather_over_tp(parameter: torch.nn.Parameter, tp: GroupInfo) -> torch.Tensor:
    dimension = _split_dimension(parameter)
    if dimension is None or tp.size == 1:
        return parameter.detach()
    parts = [torch.empty_like(parameter) for _ in range(tp.size)]
    dist.all_gather(parts, parameter.detach().contiguous(), group=tp.group)
    return torch.cat(parts, dim=dimension)
