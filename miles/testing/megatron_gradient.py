"""Megatron-Core's gradient buffers as the gradient of the package's whole `GPT`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from miles.backends.megatron_utils.actor import MegatronTrainActor
from miles.backends.megatron_utils.weights import gather_gpt_weights
from miles.backends.training_utils.parallel import get_parallel_state
from miles.backends.training_utils.train_actor import build_seeded_gpt


@torch.no_grad()
def gather_megatron_gradient(actor: MegatronTrainActor) -> dict[str, torch.Tensor]:
    """Return the whole gradient by `GPT` name; every rank calls this after `_compute_gradients`.

    Gradients stand in for the weights while the package's own gathering of weights runs, so that stages, tensor slices
    and padding come together as they do for a checkpoint.
    """
    state = get_parallel_state()
    if actor.args.use_distributed_optimizer:
        _gather_buffers(actor)
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    weights = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.copy_(parameter.main_grad)
    whole = build_seeded_gpt(actor.args, actor.vocab_size, actor.world.device)
    gather_gpt_weights(actor.chunks, whole, tp=state.tp, pp=state.pp)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}


def _gather_buffers(actor: MegatronTrainActor) -> None:
    """Fill in what the distributed optimizer's reduce-scatter left on other ranks."""
    group = get_parallel_state().intra_dp_cp.group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for ddp in actor.model:
        for buffer in ddp.buffers:
            for bucket in buffer.buckets:
                parts = list(bucket.grad_data.chunk(size))
                gathered = [torch.empty_like(part) for part in parts]
                dist.all_gather(gathered, parts[rank].clone(), group=group)
                bucket.grad_data.copy_(torch.cat(gathered))
