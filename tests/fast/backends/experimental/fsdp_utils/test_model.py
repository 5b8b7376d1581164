"""Sharding, and the mean over processes that the loss layer counts on."""

import pytest
import torch

from miles.backends.experimental.fsdp_utils import model as model_module
from miles.backends.experimental.fsdp_utils.model import (
    check_gradients_are_averaged,
    shard_model,
)
from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.backends.training_utils.train_actor import build_seeded_gpt, describe_architecture
from miles.utils.errors import UserError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.backends.experimental.fsdp_utils.rollouts import VOCAB_SIZE, make_args


def _gradients(model, factor):
    tokens = torch.arange(4)[None]
    (model(tokens, tokens, torch.tensor([0, 4], dtype=torch.int32), 4).sum() * factor).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_every_parameter_is_sharded_and_gradients_are_means():
    def run():
        with fsdp_world() as world:
            model = shard_model(build_seeded_gpt(make_args(), VOCAB_SIZE, world.device), world)
            assert all(parameter.to_local().numel() < parameter.numel() for parameter in model.parameters())
            gradients = [gradient.full_tensor().flatten() for gradient in _gradients(model, world.rank + 1)]
            return torch.cat(gradients).tolist()

    plain = torch.cat(
        [g.flatten() for g in _gradients(build_seeded_gpt(make_args(), VOCAB_SIZE, torch.device("cpu")), 1)]
    )
    for gradient in run_ranks(run, 2):
        assert gradient == pytest.approx((1.5 * plain).tolist(), rel=1e-5, abs=1e-6)  # the mean of 1 and 2 times it


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_check_passes_here(world_size):
    def run():
        with fsdp_world() as world:
            check_gradients_are_averaged(world)

    run_ranks(run, world_size)


def test_a_backend_that_sums_is_refused():
    def run():
        shard_unit = model_module.shard_unit

        def shard_and_sum(module, world):
            shard_unit(module, world).set_gradient_divide_factor(1.0)
            return module

        model_module.shard_unit = shard_and_sum
        with fsdp_world() as world, pytest.raises(UserError, match=r"on 2 cpu processes: .* gradient of 3.0 for 1.5;"):
            check_gradients_are_averaged(world)

    run_ranks(run, 2)


def test_architecture_by_argument_name():
    assert describe_architecture(make_args(), 11) == {
        "train_backend": "fsdp",
        **{"hidden_size": 8, "num_layers": 1, "num_attention_heads": 2},
        **{"max_position_embeddings": 24, "vocab_size": 11},
    }
