"""Custom off-policy corrections (`--custom-tis-function-path`): what they may ask for and have to return.

Shapes: B rows, T_i response tokens of row i on this rank, T = sum_i T_i.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from miles.backends.training_utils.loss_aggregation import concat
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.utils.errors import UserError
from miles.utils.misc import load_function
from miles.utils.options import Options

Correction = tuple[torch.Tensor, Sequence[torch.Tensor], dict[str, torch.Tensor]]

KEYWORDS = (
    *("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "local_masks"),
    *("total_lengths", "response_lengths", "max_seq_lens", "parallel_state"),
)
"""What a custom correction may ask for."""

OWN_METRICS = frozenset(
    [
        *("loss", "pg_loss", "entropy_loss", "kl_loss", "pg_clipfrac", "ppo_kl", "ess_ratio", "ois"),
        *("train_rollout_logprob_abs_diff", "train_rollout_kl"),
    ]
)
"""Metrics of the policy loss itself, whose names a correction leaves alone."""


def check_correction_signature(args: Options) -> None:
    """Check, before anything is computed, that a custom correction asks for nothing that it is not given.

    Raises:
        UserError: it has a parameter without a default that is none of `KEYWORDS`.
    """
    path = Options.of(args).custom_tis_function_path
    if path is None:
        return
    try:
        parameters = inspect.signature(load_function(path)).parameters.values()
    except ValueError:  # a built-in that does not tell its signature
        return
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    unknown = [
        parameter.name
        for parameter in parameters
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        or (parameter.name not in KEYWORDS and parameter.default is parameter.empty and parameter.kind not in variadic)
    ]
    if unknown:
        raise UserError(
            f"{path} is called with the keywords {', '.join(KEYWORDS)}, of which it may take any; it asks for "
            f"{', '.join(unknown)}. Rename them, or give them defaults"
        )


def local_rows(responses: Responses, masks: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return masks as B rows `[T_i]` of this rank, from such rows or from whole-response ones."""
    if [mask.shape for mask in masks] == [mask.shape for mask in responses.masks]:
        return masks
    return responses.slice(masks)


def check_correction(path: str, result: Any, responses: Responses, pg_loss: torch.Tensor) -> Correction:
    """Return what a custom correction returned, its masks as rows of this rank, after holding it to its contract.

    Args:
        path: The function's path, for messages.
        result: What it returned.
        responses: The micro-batch that it was called for.
        pg_loss: The per-token loss that it was given, `[T]`.

    Raises:
        UserError: it is not `(pg_loss, loss_masks, metrics)` of the right shapes, a mask holds other than 0 and 1, or
            puts a masked token in.
    """
    wanted = f"{path} must return (pg_loss, loss_masks, metrics)"
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise UserError(f"{wanted}, the metrics a dictionary; got {got}")
    corrected, masks, metrics = result
    taken = sorted(OWN_METRICS.intersection(metrics))
    if taken:
        raise UserError(f"{wanted} with names for its metrics that the loss does not use itself; got {taken}")
    for name, value in {"pg_loss": corrected, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.shape != pg_loss.shape:
            got = str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"{wanted} with {name} of shape {tuple(pg_loss.shape)}, a value for each token; got {got}")
    if pg_loss.requires_grad and not corrected.requires_grad:
        raise UserError(f"{wanted} with pg_loss keeping its gradient; it is detached from what the function was given")
    whole = [mask.shape for mask in responses.batch["loss_masks"]]
    local = [mask.shape for mask in responses.masks]
    shapes = [getattr(mask, "shape", None) for mask in masks] if isinstance(masks, (list, tuple)) else None
    if shapes not in (whole, local):
        got = type(masks).__name__ if shapes is None else str([shape and tuple(shape) for shape in shapes])
        raise UserError(
            f"{wanted} with one mask for each of {len(whole)} rows, over its whole response or over its tokens on "
            f"this rank, of lengths {[shape.numel() for shape in whole]} or {[shape.numel() for shape in local]}; "
            f"got {got}"
        )
    masks = local_rows(responses, masks)
    kept = concat(masks)
    if not ((kept == 0) | (kept == 1)).all():
        raise UserError(f"{wanted} with masks that hold 0 (rejected) and 1 (kept) only")
    if (kept.bool() & ~responses.active.to(kept.device)).any():
        raise UserError(f"{wanted} with masks that keep active tokens only; it kept one that loss_masks leaves out")
    return corrected, masks, metrics


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
