"""Megatron-Core's chunks hold the very weights of the seeded `GPT`, and compute what it computes."""

import pytest
import torch

from miles.backends.training_utils.train_actor import build_seeded_gpt
from tests.fast.backends.experimental.fsdp_utils.rollouts import VOCAB_SIZE, make_args
from tests.fast.backends.megatron_utils.worlds import LAYOUTS, MEGATRON, model, run_actors, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_go_in_and_come_out_unchanged(layout):
    world_size, options = LAYOUTS[layout]
    seeded = build_seeded_gpt(make_args(*MEGATRON), VOCAB_SIZE, torch.device("cpu"))

    def gather(actor):
        replica = actor.update_weights()
        return [
            torch.equal(ours, theirs) for ours, theirs in zip(replica.parameters(), seeded.parameters(), strict=True)
        ]

    assert all(all(equal) for equal in run_actors(options, world_size, gather))


def test_every_parameter_has_a_name_in_the_other_shape():
    seeded = build_seeded_gpt(make_args(*MEGATRON), VOCAB_SIZE, torch.device("cpu"))

    def names(actor):
        return [name for name, _ in weights.named_shards(actor.chunks)]

    first, second = run_actors(LAYOUTS["pp2"][1], 2, names)
    assert sorted(first + second) == sorted(name for name, _ in seeded.named_parameters())
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("megatron", "gpt"),
    [
        ("embedding.word_embeddings.weight", "token_embedding.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.bias", "blocks.3.attention.qkv.bias"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "blocks.2.attention_norm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_bias", "blocks.2.mlp_norm.bias"),
        ("decoder.final_layernorm.bias", "final_norm.bias"),
    ],
)
def test_names(megatron, gpt):
    assert weights.gpt_name(megatron, first_layer=2) == gpt


def test_vocabulary_is_padded_to_equal_shares():
    assert [model.pad_vocab_size(14, size) for size in (1, 2, 4, 8)] == [14, 14, 16, 16]
