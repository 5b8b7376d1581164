"""The response tokens of one micro-batch, as flat tensors in which masked positions hold 0."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from miles.backends.training_utils.cp_utils import all_reduce_with_cp, get_local_response_loss_masks
from miles.backends.training_utils.loss_aggregation import concat, mask_sums
from miles.backends.training_utils.loss_hub.math_utils import row_sums, spread_over_tokens
from miles.utils.types import RolloutBatch


def slice_rows(args: Namespace, batch: RolloutBatch, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Slice a micro-batch's B whole-response rows to their tokens on this context-parallel rank."""
    return get_local_response_loss_masks(
        batch["total_lengths"], batch["response_lengths"], rows, args.qkv_format, batch.get("max_seq_lens")
    )


@dataclass(frozen=True)
class Responses:
    """The response tokens of a micro-batch on this rank, with everything at masked positions replaced by 0.

    A NaN that entered an exp or a product at a masked position would come back as 0 * NaN in the backward pass even
    though the reducer never reads it, so it is kept out before any arithmetic.
    """

    args: Namespace
    batch: RolloutBatch
    masks: list[torch.Tensor]
    active: torch.Tensor

    @classmethod
    def of(cls, args: Namespace, batch: RolloutBatch) -> Responses:
        """Slice the micro-batch's masks to this context-parallel rank."""
        masks = slice_rows(args, batch, batch["loss_masks"])
        return cls(args, batch, masks, concat(masks) != 0)

    def column(self, key: str, *, needed_for: str) -> torch.Tensor:
        """Return `batch[key]` as `[T]`, detached."""
        rows = self.batch.get(key)
        if rows is None:
            raise ValueError(
                f"{needed_for} needs batch[{key!r}], one tensor of response length per row; it is missing"
            )
        return self.clean(concat(rows).detach())

    def clean(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[T]` values with 0 at masked positions."""
        return torch.where(self.active.to(values.device), values, values.new_zeros(()))

    def slice(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Slice B whole-response rows to their tokens on this rank."""
        return slice_rows(self.args, self.batch, rows)

    def per_row(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Cut `[T]` values into B rows `[T_i]`."""
        return list(values.split([mask.numel() for mask in self.masks])) if self.masks else []

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return each token's row mean over the active tokens of the whole response, `[T]`."""
        counts = mask_sums(self.batch["loss_masks"]).clamp_min(1).to(values.device)
        means = all_reduce_with_cp(row_sums(self.clean(values), self.masks)) / counts
        return spread_over_tokens(means, self.masks)
