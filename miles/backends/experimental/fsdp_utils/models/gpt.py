"""A GPT-2 style causal language model over packed rows.

Shapes: T packed tokens of all rows, B rows, S the longest row, H hidden size, A heads, D = H / A, V vocabulary.
The parts, their biases and the layout of the fused query-key-value weight are those of Megatron-Core's `GPTModel`
with learned absolute positions, so that one set of weights fits both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miles.utils.errors import UserError

GPT2_WIDTH, GPT2_STD = 768, 0.02
"""Width and initial standard deviation of the smallest GPT-2. Ours keeps std * sqrt(H): with 0.02 at a tenth of the
width, activations start so small that a tiny model takes several times as long to learn."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream; a multiple of `num_attention_heads`.
        num_layers: Number of transformer blocks.
        num_attention_heads: Heads per block.
        max_position_embeddings: Longest row, prompt and response together, in tokens.

    Raises:
        UserError: a size below one, or a hidden size that the heads do not divide.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size must be a multiple of num_attention_heads, "
                f"got {self.hidden_size} and {self.num_attention_heads}"
            )


@dataclass(frozen=True)
class RowLayout:
    """Where each packed token stands in a padded [B, S] grid.

    Attributes:
        row: Row of each token, int64 [T].
        column: Position of each token in its row, int64 [T].
        num_rows: B.
        width: S.
    """

    row: Tensor
    column: Tensor
    num_rows: int
    width: int

    @staticmethod
    def of(cu_seqlens: Tensor, num_tokens: int) -> RowLayout:
        """Return the layout of rows `[cu_seqlens[i], cu_seqlens[i + 1])`; tokens past the last form a row of padding.

        Args:
            cu_seqlens: Row boundaries, int32 [rows + 1], starting at 0.
            num_tokens: T.
        """
        token = torch.arange(num_tokens, device=cu_seqlens.device)
        row = torch.searchsorted(cu_seqlens[1:].long().contiguous(), token, right=True)
        column = token - cu_seqlens[row]
        return RowLayout(row, column, num_rows=int(row[-1]) + 1, width=int(column.max()) + 1)

    def pad(self, packed: Tensor) -> Tensor:
        """Return packed [T, ...] as [B, S, ...], zero where a row has ended."""
        padded = packed.new_zeros(self.num_rows, self.width, *packed.shape[1:])
        return padded.index_put((self.row, self.column), packed)

    def pack(self, padded: Tensor) -> Tensor:
        """Return padded [B, S, ...] as [T, ...]: the inverse of `pad`."""
        return padded[self.row, self.column]


class Attention(nn.Module):
    """Causal self-attention within each row."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, layout: RowLayout) -> Tensor:
        """Map [T, H] to [T, H]; the fused weight holds query, key and value of one head after another."""
        qkv = self.qkv(hidden).view(hidden.size(0), self.num_heads, -1)
        query, key, value = layout.pad(qkv).transpose(1, 2).chunk(3, dim=-1)  # each [B, A, S, D]
        # Rows are padded at the end, so the causal mask alone keeps padding out of every real position.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(layout.pack(mixed.transpose(1, 2)).flatten(1))


class MLP(nn.Module):
    """Two linear layers, four times as wide between, with GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.proj = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [T, H] to [T, H]."""
        return self.proj(F.gelu(self.up(hidden)))


class Block(nn.Module):
    """One pre-LayerNorm transformer block: the unit that FSDP2 shards."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, layout: RowLayout) -> Tensor:
        """Map [T, H] to [T, H]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), layout)
        return hidden + self.mlp(self.mlp_norm(hidden))


class GPT(nn.Module):
    """Causal language model: embeddings, blocks, final LayerNorm, untied output layer without bias."""

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        """Build the model with weights that depend on `config` and `seed` alone, not on the global random state."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.final_norm = nn.LayerNorm(config.hidden_size)
            self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self._init_weights()

    def _init_weights(self) -> None:
        """Draw weights as GPT-2 does: narrower by sqrt(2 * layers) where a branch joins the residual, biases zero."""
        std = GPT2_STD * math.sqrt(GPT2_WIDTH / self.config.hidden_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                joins_residual = name.endswith("proj.weight")
                nn.init.normal_(parameter, std=std / math.sqrt(2 * len(self.blocks)) if joins_residual else std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Return next-token logits of packed rows; no row sees another.

        Args:
            tokens: Token ids, int64 [1, T]. Tokens past the last row are padding, seen by no row.
            position_ids: Position of each token in its row, int64 [1, T].
            cu_seqlens: Row boundaries, int32 [rows + 1], starting at 0.
            max_seqlen: Tokens in the longest row.

        Returns:
            Logits, float32 [1, T, V].

        Raises:
            UserError: a row is longer than `max_position_embeddings`.
        """
        limit = self.config.max_position_embeddings
        if max_seqlen > limit:
            raise UserError(
                f"a sequence has {max_seqlen} tokens, more than the model's {limit} positions; "
                f"raise --max-position-embeddings to at least {max_seqlen}"
            )
        layout = RowLayout.of(cu_seqlens, tokens.size(1))
        hidden = self.token_embedding(tokens[0]) + self.position_embedding(position_ids[0])
        for block in self.blocks:
            hidden = block(hidden, layout)
        # The batch axis comes before the last layer: FSDP2 hooks this output and warns of a view.
        return self.output(self.final_norm(hidden)[None]).float()
