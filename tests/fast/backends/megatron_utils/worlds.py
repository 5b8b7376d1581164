"""Forked worlds of the Megatron-Core backend; importing this module skips where megatron-core is not installed."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra `megatron`)")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says at length which accelerators it does without
    import miles.backends.megatron_utils.actor
    import miles.backends.megatron_utils.cpu  # noqa: F401  imported once, here, so that forks start with it
    from miles.backends.megatron_utils import model, weights

from miles.backends.training_utils.backend import open_backend
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.backends.experimental.fsdp_utils.rollouts import PAD_TOKEN_ID, VOCAB_SIZE, make_args

MEGATRON = ["--train-backend", "megatron", "--num-layers", "4"]
LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "cp2": (2, ["--context-parallel-size", "2"]),
    "vpp2": (2, ["--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "2"]),
    "distributed optimizer": (2, ["--use-distributed-optimizer"]),
}
"""World size and options by name."""

__all__ = ["LAYOUTS", "MEGATRON", "model", "run_actors", "weights"]


def run_actors(options: list[str], world_size: int, use: Callable[[Any], Any], **limits: float) -> list[Any]:
    """Return what `use(actor)` returns on each rank of a Megatron world."""

    def run() -> Any:
        args = make_args(*MEGATRON, *options)
        with open_backend(args) as (world, make_actor):
            return use(make_actor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=PAD_TOKEN_ID))

    return run_ranks(run, world_size, **limits)
