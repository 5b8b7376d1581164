"""The packed model against a row-by-row reference written from the formulas, with an explicit mask."""

import math

import pytest
import torch
from torch import Tensor, nn

from miles.backends.experimental.fsdp_utils.models.gpt import GPT, GPTConfig, RowLayout
from miles.utils.errors import UserError

CONFIG = GPTConfig(vocab_size=11, hidden_size=8, num_layers=2, num_attention_heads=2, max_position_embeddings=16)
ROWS = [[3], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7], [10, 0]]


def make_model(dtype: torch.dtype = torch.float64, config: GPTConfig = CONFIG) -> GPT:
    """Weights far from their small start and biases off zero, so that every part shows in the output."""
    model = GPT(config, seed=1).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def packed(rows: list[list[int]], padding: int = 0) -> dict[str, Tensor | int]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    tokens = [token for row in rows for token in row] + [0] * padding
    positions = [place for row in rows for place in range(len(row))] + [0] * padding
    return {
        "tokens": torch.tensor([tokens]),
        "position_ids": torch.tensor([positions]),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max((len(row) for row in rows), default=0),
    }


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def reference(model: GPT, row: list[int]) -> Tensor:
    """Logits [S, V] of one row; the fused weight is read head by head: query, key, value of each."""
    size = model.config.hidden_size // model.config.num_attention_heads
    x = model.token_embedding.weight[row] + model.position_embedding.weight[: len(row)]
    for block in model.blocks:
        qkv = linear(norm(x, block.attention_norm), block.attention.qkv)
        heads = []
        for head in range(model.config.num_attention_heads):
            query, key, value = qkv[:, head * 3 * size : (head + 1) * 3 * size].split(size, dim=-1)
            scores = query @ key.T / math.sqrt(size)
            future = torch.ones(len(row), len(row)).triu(1).bool()
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
        x = x + linear(torch.cat(heads, -1), block.attention.proj)
        x = x + linear(gelu(linear(norm(x, block.mlp_norm), block.mlp.up)), block.mlp.proj)
    return linear(norm(x, model.final_norm), model.output)


@pytest.mark.parametrize("padding", [0, 1, 9], ids="{} padding tokens".format)
def test_packed_rows_equal_the_reference_row_by_row(padding: int) -> None:
    model = make_model()
    logits = model(**packed(ROWS, padding))
    assert logits.shape == (1, sum(map(len, ROWS)) + padding, CONFIG.vocab_size)
    expected = torch.cat([reference(model, row) for row in ROWS])
    # float64 inside; the logits are rounded to float32 once at the end.
    torch.testing.assert_close(logits[0, : len(expected)], expected.float(), rtol=1e-6, atol=1e-6)


def test_gradients_equal_the_reference() -> None:
    model = make_model()
    weights = torch.randn(sum(map(len, ROWS)), CONFIG.vocab_size, generator=torch.Generator().manual_seed(2)).double()
    (model(**packed(ROWS))[0].double() * weights).sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    (torch.cat([reference(model, row) for row in ROWS]) * weights).sum().backward()
    for name, parameter in model.named_parameters():
        # The key bias shifts all scores of a query alike, so parts of its gradient are zero up to rounding.
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_logits_are_float32_in_any_dtype() -> None:
    assert make_model(torch.bfloat16)(**packed(ROWS)).dtype == torch.float32


def test_a_token_changes_only_its_own_row_from_its_place_on() -> None:
    model = make_model()
    before = model(**packed(ROWS))[0]
    changed = [list(row) for row in ROWS]
    changed[1][3] = 0
    after = model(**packed(changed))[0]
    moved = (before - after).abs().amax(-1) > 0
    # Row 1 covers packed tokens 1 to 7; its fourth token is number 4.
    assert moved.tolist() == [4 <= token <= 7 for token in range(sum(map(len, ROWS)))]


def test_a_micro_batch_without_rows_runs_and_gives_zero_gradients() -> None:
    model = make_model()
    logits = model(**packed([], padding=1))
    assert logits.shape == (1, 1, CONFIG.vocab_size)
    assert torch.isfinite(logits).all()
    (logits.sum() * 0).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_layout_pads_and_packs() -> None:
    layout = RowLayout.of(torch.tensor([0, 1, 4], dtype=torch.int32), 6)
    assert layout.row.tolist() == [0, 1, 1, 1, 2, 2]
    assert layout.column.tolist() == [0, 0, 1, 2, 0, 1]
    packed_values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    padded = layout.pad(packed_values)
    assert padded.tolist() == [[1.0, 0.0, 0.0], [2.0, 3.0, 4.0], [5.0, 6.0, 0.0]]
    assert layout.pack(padded).tolist() == packed_values.tolist()


def test_weights_follow_from_the_seed_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    first = GPT(CONFIG, seed=3).state_dict()
    assert torch.equal(torch.rand(3), undisturbed)
    second, other = GPT(CONFIG, seed=3).state_dict(), GPT(CONFIG, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


def test_initial_weights_have_gpt2_widths() -> None:
    # GPT-2's 0.02 at width 768 is 0.02 * sqrt(6) = 0.049 at width 128; into the residual, divided by sqrt(2 * 8) = 4.
    model = GPT(GPTConfig(500, 128, num_layers=8, num_attention_heads=4, max_position_embeddings=64))
    block = model.blocks[3]
    for layer, std in [(block.attention.qkv, 0.049), (block.attention.proj, 0.01225), (block.mlp.proj, 0.01225)]:
        assert float(layer.weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert not block.mlp.up.bias.any()
    assert model.output.bias is None
    assert model.output.weight is not model.token_embedding.weight


def test_a_row_longer_than_the_positions_is_an_error() -> None:
    with pytest.raises(UserError, match=r"17 tokens.*16 positions.*--max-position-embeddings to at least 17"):
        make_model()(**packed([[1], [2] * 17]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((11, 8, 2, 3, 16), "hidden_size must be a multiple of num_attention_heads, got 8 and 3"),
     ((11, 8, 0, 2, 16), "num_layers must be at least 1, got 0")],
)  # fmt: skip
def test_impossible_sizes_are_errors(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPTConfig(*sizes)
