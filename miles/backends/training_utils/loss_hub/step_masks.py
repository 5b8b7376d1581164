"""The masks that a correction leaves: one set for the whole step, whatever micro-batch asks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

from miles.backends.training_utils.cp_utils import gather_responses_with_cp
from miles.backends.training_utils.loss_aggregation import concat
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.utils.errors import UserError


def step_masks(args: Namespace, responses: Responses, local_masks: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a micro-batch's whole-response masks after correction.

    Args:
        args: Reads `custom_tis_function_path` and `qkv_format`.
        responses: The micro-batch. Its "kept_masks", from `prepare_loss_terms`, are the answer; a batch without that
            column takes the masks of its own call.
        local_masks: What the correction left in this call, B rows `[T_i]` of this rank.

    Raises:
        UserError: a custom correction left other masks here than for the whole step.
    """
    kept = responses.batch.get("kept_masks")
    if kept is None:
        return gather_masks(args, responses, local_masks)
    path = getattr(args, "custom_tis_function_path", None)
    if path is not None:
        refuse_other_masks(path, responses, local_masks, responses.slice(kept))
    return kept


def refuse_other_losses(path: str, responses: Responses, loss: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that a custom correction changes each token's loss alike whatever rows it is called with.

    Args:
        path: The function's path, for messages.
        responses: The rows.
        loss: `[T]` what it made of a constant loss in this call.
        expected: `[T]` what it made of it in another call.

    Raises:
        UserError: naming the first sample that differs.
    """
    differs = ~torch.isclose(loss, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    if not differs.any():
        return
    row = next(row for row, part in enumerate(responses.per_row(differs)) if part.any())
    raise UserError(
        f"{path} must change a token's loss alike whatever rows it is called with: of sample {_name(responses, row)} "
        "it makes something else alone than together with others. The loss of a token may be changed by its own row's "
        "log-probs and mask, not by an average over the call; micro-batches and ranks would change the result"
    )


def _name(responses: Responses, row: int) -> int:
    """Return how messages name a row: its index in the rollout, or else its place in the micro-batch."""
    indices = responses.batch.get("sample_indices")
    return row if indices is None or indices[row] is None else indices[row]


def gather_masks(args: Namespace, responses: Responses, local_masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put rows `[T_i]` of all context-parallel ranks together, a byte a token: B whole-response masks, int64."""
    batch = responses.batch
    lengths = batch["response_lengths"]
    local_rows = list(concat(local_masks).to(torch.uint8).split([mask.numel() for mask in local_masks]))
    rows = gather_responses_with_cp(
        local_rows, batch["total_lengths"], lengths, args.qkv_format, batch.get("max_seq_lens")
    )
    return list(concat(rows).to(torch.int64).split(list(lengths)))


def refuse_other_masks(
    path: str, responses: Responses, masks: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    """Check that a custom correction left the masks `[T_i]` that it left for the whole step.

    Raises:
        UserError: naming the first sample that differs.
    """
    if torch.equal(concat(masks) != 0, concat(expected) != 0):
        return
    row = next(
        row
        for row, (one, other) in enumerate(zip(masks, expected, strict=True))
        if not torch.equal(one != 0, other != 0)
    )
    raise UserError(
        f"{path} must leave the same masks whatever rows it is called with: of sample {_name(responses, row)} it "
        f"keeps {int((expected[row] != 0).sum())} tokens in the whole step and {int((masks[row] != 0).sum())}, or "
        "others, among fewer of them. A mask may depend on the row's own log-probs and mask, not on the other rows, "
        "pg_loss or chance; the step's totals are taken before its first micro-batch"
    )
