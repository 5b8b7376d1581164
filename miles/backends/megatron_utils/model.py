"""Building the policy with Megatron-Core: configuration, layer spec, one chunk for each virtual pipeline stage."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron_utils.core_attention import PackedCoreAttention
from miles.utils.options import Options
from miles.utils.types import RolloutBatch


def build_config(args: Options, *, per_token: bool) -> TransformerConfig:
    """Return Megatron's configuration of a GPT-2 style model in float32, without dropout.

    Args:
        args: Reads the sizes of the model and of the parallel axes.
        per_token: Whether Megatron divides gradients by the token counts that the loss function reports.
    """
    is_interleaved = args.virtual_pipeline_model_parallel_size is not None
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        # Micro-batches differ in length, so stages tell each other the shape of what they send.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the one that admits variable lengths; there are no experts
        batch_p2p_comm=not is_interleaved,
        overlap_p2p_comm=is_interleaved,
        batch_p2p_sync=False,
    )


def build_chunks(args: Options, config: TransformerConfig, *, vocab_size: int, device: Any) -> list[GPTModel]:
    """Return this rank's part of the model, one chunk for each virtual pipeline stage."""
    stages = range(args.virtual_pipeline_model_parallel_size) if args.virtual_pipeline_model_parallel_size else [None]
    return [
        GPTModel(
            config,
            _layer_spec(device),
            vocab_size=pad_vocab_size(vocab_size, args.tensor_model_parallel_size),
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=False,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        ).to(device)
        for stage in stages
    ]


def _layer_spec(device: torch.device) -> Any:
    """Return Transformer Engine's layers on a GPU that has it, else Megatron's local ones with our core attention."""
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    return spec


def pad_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the next multiple of `tp_size`: the vocabulary is split over the tensor-parallel ranks in equal parts."""
    return -(-vocab_size // tp_size) * tp_size


def wrap_ddp(args: Options, config: TransformerConfig, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's own data parallelism, gradients in float32."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    return [
        # As Megatron's own training: only the first chunk is split into buckets, the others' gradients come early.
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(args: Options, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Return Megatron's optimizer with the same AdamW hyperparameters as the FSDP2 backend.

    Weight decay applies to every parameter, as there: Megatron would leave biases and norms out.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, model, config_overrides={})


def forward_chunk(model: DistributedDataParallel | GPTModel, batch: RolloutBatch, *, vocab_size: int) -> torch.Tensor:
    """Run this rank's chunk on a packed micro-batch.

    Returns:
        On the last stage logits `[1, T, V / tp]` float32 of this rank's share of the (padded) vocabulary, with the
        padding out of reach; hidden states elsewhere.
    """
    edges, longest = batch["cu_seqlens"], batch["max_seqlen"]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    output = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed)
    chunk = getattr(model, "module", model)  # the reference is not wrapped
    return _without_padding(output, vocab_size) if chunk.post_process else output


def _without_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Push the logits of padded vocabulary entries so far down that their probability is exactly 0."""
    first = mpu.get_tensor_model_parallel_rank() * logits.size(-1)
    columns = torch.arange(first, first + logits.size(-1), device=logits.device)
    if first + logits.size(-1) <= vocab_size:
        return logits.float()
    return torch.where(columns < vocab_size, logits.float(), -1e30)
