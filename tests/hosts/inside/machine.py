"""What a host asks of its machine and of Megatron-LM's launcher, answered for CPUs and one process per rank.

Importing this module installs the stand-ins; after that the host's own modules import.
"""

from __future__ import annotations

import argparse
import warnings
from argparse import Namespace
from typing import Any
from unittest import mock

import stubs
import torch
from torch.overrides import TorchFunctionMode

stubs.install()
warnings.filterwarnings("ignore")

# Megatron-LM's launcher is not on the package index (megatron-core is): the flags of its that the hosts read.
MEGATRON_FLAGS: dict[str, Any] = {
    "accumulate_allreduce_grads_in_fp32": False,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "attention_backend": "local",
    "calculate_per_token_loss": False,
    "ckpt_step": None,
    "clip_grad": 1.0,
    "context_parallel_size": 1,
    "cp_comm_type": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "decoder_seq_length": None,
    "enable_gloo_process_groups": True,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "ffn_hidden_size": 16,
    "fp16": False,
    "global_batch_size": None,
    "hidden_size": 8,
    "kv_channels": 4,
    "load": None,
    "lr": 1e-6,
    "max_position_embeddings": None,
    "micro_batch_size": 1,
    "moe_layer_freq": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "num_attention_heads": 2,
    "num_experts": None,
    "num_layers": 2,
    "num_query_groups": 2,
    "optimizer": "adam",
    "optimizer_cpu_offload": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "rope",
    "q_lora_rank": None,
    "recompute_granularity": None,
    "save": None,
    "save_interval": None,
    "seq_length": None,
    "sequence_parallel": False,
    "tensor_model_parallel_size": 1,
    "tokenizer_model": None,
    "tokenizer_type": None,
    "transformer_impl": "local",
    "use_distributed_optimizer": False,
    "variable_seq_lengths": False,
    "virtual_pipeline_model_parallel_size": None,
    "vocab_size": 64,
    "padded_vocab_size": 64,
}


def _megatron_parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in MEGATRON_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=default)
        else:
            parser.add_argument(flag, type=type(default) if default is not None else _number_or_text, default=default)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()


def _number_or_text(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


class _CpuForCuda(TorchFunctionMode):
    """Sends `device="cuda"` and `.cuda()` to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def _float32_gradients(
    softmax: torch.Tensor, grad_output: torch.Tensor, target_mask: torch.Tensor, masked_target_1d: torch.Tensor
) -> torch.Tensor:
    """Megatron's fused cross entropy's gradient, without its last step, the rounding to bfloat16."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Entropy

    operands = Entropy.prepare_gradient_calculation_operands(softmax, target_mask)
    grad_2d, arange_1d, softmax_update, grad_input = operands
    return Entropy.calculate_gradients(grad_2d, arange_1d, masked_target_1d, softmax_update, grad_input, grad_output)


class _Running:
    """The namespace that Megatron-LM's `get_args` returns: that of the run in progress."""

    args: Namespace | None = None


def prepare() -> None:
    """Answer for the object store, the devices and Megatron-LM's globals; once per process."""
    ray = stubs.importable("ray")
    ray.put = lambda value, **options: value
    ray.get = lambda reference, **options: reference
    stubs.importable("megatron.training.arguments").parse_args = _megatron_parse_args
    stubs.importable("megatron.training.arguments").validate_args = lambda args, *rest: args
    stubs.importable("megatron.training.global_vars").get_args = lambda: _Running.args
    stubs.importable("sglang.srt.debug_utils.dumper").DumperConfig._kv_pairs_to_dict = lambda pairs: {}
    mock.patch("megatron.core.fusions.fused_cross_entropy.calculate_gradients", _float32_gradients).start()
    mock.patch("torch.cuda.current_device", lambda: "cpu").start()
    mock.patch("torch.cuda.synchronize", lambda *args: None).start()
    mock.patch("torch.cuda.empty_cache", lambda *args: None).start()
    _CpuForCuda().__enter__()


def run_under(args: Namespace) -> None:
    """Make `args` the ones of the run in progress."""
    _Running.args = args
