"""The response tokens of one micro-batch on this rank, and the sums over them.

Shapes: B rows; T_i response tokens of row i on this rank, T = sum_i T_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from miles.backends.training_utils.cp_utils import (
    all_reduce_with_cp,
    gather_responses_with_cp,
    get_local_response_loss_masks,
    get_sum_of_sample_mean,
)
from miles.backends.training_utils.loss_aggregation import Reducer, concat, mask_sums
from miles.backends.training_utils.loss_hub.math_utils import repeat_over_tokens, row_sums, split_like
from miles.utils.options import Options
from miles.utils.types import RolloutBatch


@dataclass(frozen=True)
class Responses:
    """A micro-batch read as its response tokens.

    Values at masked positions are replaced by 0: a NaN that entered an exp or a product there would come back as
    0 * NaN in the backward pass even though the reducer never reads it.

    Attributes:
        args: The run's options.
        batch: The micro-batch: "total_lengths", "response_lengths", "loss_masks" and what the loss reads.
    """

    args: Options
    batch: RolloutBatch

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        """B loss masks `[T_i]`."""
        return self.slice(self.batch["loss_masks"])

    @cached_property
    def active(self) -> torch.Tensor:
        """`[T]`, whether a token's mask is set."""
        return concat(self.masks) != 0

    @cached_property
    def lengths(self) -> list[int]:
        """B numbers T_i."""
        return [mask.numel() for mask in self.masks]

    def slice(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Slice B whole-response rows to their tokens on this rank."""
        totals, lengths = self.batch["total_lengths"], self.batch["response_lengths"]
        return get_local_response_loss_masks(
            totals, lengths, rows, self.args.qkv_format, self.batch.get("max_seq_lens")
        )

    def gather(self, masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Put masks `[T_i]` of all context-parallel ranks together, a byte a token: B whole-response rows, int64."""
        totals, lengths = self.batch["total_lengths"], self.batch["response_lengths"]
        rows = split_like(concat(masks).to(torch.uint8), masks)
        whole = gather_responses_with_cp(rows, totals, lengths, self.args.qkv_format, self.batch.get("max_seq_lens"))
        return split_like(concat(whole).to(torch.int64), whole)

    def sample_mean(
        self, masks: Sequence[torch.Tensor], denominators: torch.Tensor | Sequence[torch.Tensor] | None
    ) -> Reducer:
        """Build the sample-mean reducer over B whole-response masks; without divisors a row's are its tokens."""
        return self._reducer(masks, sample_denoms=denominators)

    def token_sum(self, masks: Sequence[torch.Tensor]) -> Reducer:
        """Build the token-sum reducer over B whole-response masks."""
        return self._reducer(masks, calculate_per_token_loss=True)

    def _reducer(
        self,
        masks: Sequence[torch.Tensor],
        *,
        calculate_per_token_loss: bool = False,
        sample_denoms: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Reducer:
        return get_sum_of_sample_mean(
            self.batch["total_lengths"],
            self.batch["response_lengths"],
            masks,
            calculate_per_token_loss,
            self.args.qkv_format,
            self.batch.get("max_seq_lens"),
            sample_denoms,
        )

    def column(self, key: str, *, needed_for: str) -> torch.Tensor:
        """Return `batch[key]` as `[T]`, detached, 0 at masked positions.

        Raises:
            ValueError: the batch has no such column.
        """
        rows = self.batch.get(key)
        if rows is None:
            raise ValueError(
                f"{needed_for} needs batch[{key!r}], one tensor of response length per row; it is missing"
            )
        return self.clean(concat(rows).detach())

    def clean(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[T]` values with 0 at masked positions."""
        return torch.where(self.active.to(values.device), values, values.new_zeros(()))

    def per_row(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split `[T]` values into B rows `[T_i]`."""
        return split_like(values, self.masks)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return each token's row mean over the active tokens of the whole response, `[T]`."""
        counts = mask_sums(self.batch["loss_masks"]).clamp_min(1).to(values.device)
        means = all_reduce_with_cp(row_sums(self.clean(values), self.masks)) / counts
        return repeat_over_tokens(means, self.masks)
