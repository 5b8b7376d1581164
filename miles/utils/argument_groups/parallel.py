"""Options of the Megatron-Core backend's parallelism, under Megatron's names."""

import argparse

from miles.utils.argument_groups.common import reset_arg


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many processes share one copy of the model, and how."""
    group = parser.add_argument_group(
        "parallelism",
        "For --train-backend megatron. Processes beyond the product of the three sizes are data parallel.",
    )
    reset_arg(
        group,
        "--tensor-model-parallel-size",
        type=int,
        default=1,
        help="processes that split each layer's matrices and the vocabulary; must divide --num-attention-heads",
    )
    reset_arg(
        group,
        "--pipeline-model-parallel-size",
        type=int,
        default=1,
        help="processes that split the layers into stages; must divide --num-layers",
    )
    reset_arg(
        group,
        "--context-parallel-size",
        type=int,
        default=1,
        help="processes that split each sequence (zigzag)",
    )
    reset_arg(
        group,
        "--virtual-pipeline-model-parallel-size",
        type=int,
        default=None,
        help="stages on each pipeline process (interleaved schedule); at least 2. Unset: one",
    )
    reset_arg(
        group,
        "--use-distributed-optimizer",
        action="store_true",
        default=False,
        help="shard optimizer state over the data-parallel processes",
    )
    reset_arg(
        group,
        "--overlap-grad-reduce",
        action="store_true",
        default=False,
        help="reduce gradients while the backward pass still runs",
    )
