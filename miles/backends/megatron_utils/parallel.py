"""The processes of a Megatron-Core run: its parallel groups, and the `ParallelState` that the loss layer reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.backends.training_utils.process_group import World, process_group
from miles.utils.errors import UserError
from miles.utils.options import Options


@contextmanager
def megatron_world(args: Options) -> Iterator[World]:
    """Open the process group and Megatron's parallel axes, on a CPU with what Megatron needs there.

    Yields:
        This process's place in the run.

    Raises:
        UserError: the number of processes is not a multiple of the model-parallel sizes' product.
    """
    with process_group() as world:
        check_world_size(args, world.size)
        with _megatron_on(world):
            create_megatron_parallel_state(args)
            try:
                yield world
            finally:
                mpu.destroy_model_parallel()


def _megatron_on(world: World) -> AbstractContextManager[None]:
    if world.device.type == "cuda":
        return nullcontext()
    from miles.backends.megatron_utils.cpu import megatron_on_cpu

    return megatron_on_cpu()


def check_world_size(args: Options, world_size: int) -> None:
    """Check that the processes can be arranged on the axes.

    Raises:
        UserError: they cannot; the same on every rank.
    """
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
    }
    model_size = math.prod(sizes.values())
    if world_size % model_size:
        listed = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"{world_size} process{'es' * (world_size > 1)} cannot be arranged as {listed} = {model_size} times a "
            f"data-parallel size; start a multiple of {model_size} (torchrun --nproc-per-node {model_size})"
        )


def create_megatron_parallel_state(args: Options) -> ParallelState:
    """Split the initialised process group into Megatron's axes and install them.

    Args:
        args: Reads `tensor_model_parallel_size`, `pipeline_model_parallel_size`, `context_parallel_size` and
            `virtual_pipeline_model_parallel_size`.
    """
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    state = ParallelState(
        intra_dp=_axis(mpu.get_data_parallel_group(), mpu.get_data_parallel_group_gloo()),
        intra_dp_cp=_axis(
            mpu.get_data_parallel_group(with_context_parallel=True),
            mpu.get_data_parallel_group_gloo(with_context_parallel=True),
        ),
        cp=_axis(mpu.get_context_parallel_group()),
        tp=_axis(mpu.get_tensor_model_parallel_group()),
        pp=_axis(mpu.get_pipeline_model_parallel_group()),
        is_pp_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=True),
        vpp_size=args.virtual_pipeline_model_parallel_size or 1,
        microbatch_group_size_per_vp_stage=args.pipeline_model_parallel_size,
    )
    set_parallel_state(state)
    return state


def _axis(group: dist.ProcessGroup, gloo_group: dist.ProcessGroup | None = None) -> GroupInfo:
    return GroupInfo(dist.get_rank(group), dist.get_world_size(group), group, gloo_group)
