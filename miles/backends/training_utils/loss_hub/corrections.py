"""Importance-sampling corrections for the gap between the policy that sampled and the policy that trains.

A correction is called with keywords and returns `(pg_loss, loss_masks, metrics)`: the corrected per-token loss `[T]`,
the masks of the tokens that are left (B rows, each over its whole response or over its tokens on this rank), and
per-token metrics `[T]`. What it leaves may depend on log-probs and masks alone: it is known before the step's first
micro-batch, and every total of the step with it.

Shapes: B rows, T_i response tokens of row i on this rank, T = sum_i T_i. r is pi_train / pi_rollout at a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from miles.backends.training_utils.cp_utils import all_reduce_with_cp
from miles.backends.training_utils.loss_aggregation import concat, mask_sums, one_for_zero
from miles.backends.training_utils.loss_hub.custom_correction import (
    Correction,
    check_correction,
    local_rows,
    refuse_other_masks,
)
from miles.backends.training_utils.loss_hub.math_utils import repeat_over_tokens, row_sums, safe_exp, split_like
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.misc import load_function
from miles.utils.options import Options


def corrects_off_policy(args: Options) -> bool:
    """Whether the policy loss calls a correction, for its loss and masks or for its metrics alone."""
    return args.use_tis or args.get_mismatch_metrics


def may_reject(args: Options) -> bool:
    """Whether the correction of the policy loss may leave other masks than it was given."""
    if args.loss_type != "policy_loss" or not corrects_off_policy(args):
        return False
    return args.custom_tis_function_path is not None or (args.use_tis and args.tis_type != "truncated")


def step_masks(responses: Responses, local_masks: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a micro-batch's whole-response masks after correction: one set for the whole step.

    Args:
        responses: The micro-batch. Its "kept_masks", from `prepare_loss_terms`, are the answer; a batch without that
            column takes the masks of its own call.
        local_masks: What the correction left in this call, B rows `[T_i]` of this rank.

    Raises:
        UserError: a custom correction left other masks here than for the whole step.
    """
    kept = responses.batch.get("kept_masks")
    if kept is None:
        return responses.gather(local_masks)
    path = responses.args.custom_tis_function_path
    if path is not None:
        refuse_other_masks(path, responses, local_masks, responses.slice(kept))
    return kept


def run_correction(responses: Responses, pg_loss: torch.Tensor) -> Correction:
    """Call the correction that the options choose on a micro-batch.

    It is the function at `custom_tis_function_path`, else that of `tis_type`. Without `use_tis` a built-in correction
    gives its metrics and leaves loss and masks alone, while a custom one decides that itself.

    Args:
        responses: The micro-batch; its "log_probs" are pi_train's, its "rollout_log_probs" pi_rollout's. A custom
            function gets None for the latter where the rollout has none.
        pg_loss: `[T]` per-token loss.

    Returns:
        The corrected loss `[T]`, the masks that are left as B rows `[T_i]` of this rank, and the metrics.

    Raises:
        ValueError: a column is missing.
        UserError: a custom function broke its contract.
    """
    args, batch = responses.args, responses.batch
    path = args.custom_tis_function_path
    needed = "an off-policy correction (--use-tis, --get-mismatch-metrics)"
    has_rollout = batch.get("rollout_log_probs") is not None

    def rows(key: str) -> list[torch.Tensor]:
        return responses.per_row(responses.column(key, needed_for=needed))

    def own(masks: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return masks that the function may write into."""
        return masks if path is None else [mask.clone() for mask in masks]

    result = _call(
        BUILT_IN[args.tis_type] if path is None else load_function(path),
        args=args,
        pg_loss=pg_loss,
        train_log_probs=rows("log_probs"),
        rollout_log_probs=rows("rollout_log_probs") if has_rollout or path is None else None,
        loss_masks=own(batch["loss_masks"]),
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        parallel_state=get_parallel_state(),
        max_seq_lens=batch.get("max_seq_lens"),
        local_masks=own(responses.masks),
    )
    if path is not None:
        return check_correction(path, result, responses, pg_loss)
    corrected, masks, metrics = result
    if not args.use_tis:
        corrected, masks = pg_loss, batch["loss_masks"]
    return corrected, local_rows(responses, masks), metrics


def _call(function: Callable[..., Any], **keywords: Any) -> Any:
    """Call a correction with those keywords that it declares, all of them where it takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a built-in that does not tell its signature
        return function(**keywords)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**keywords)
    return function(**{name: value for name, value in keywords.items() if name in parameters})


def _ratio(train_log_probs: Sequence[torch.Tensor], rollout_log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    return safe_exp(concat(train_log_probs) - concat(rollout_log_probs)).detach()


def _metrics(ratio: torch.Tensor, changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": ratio, "tis_clipfrac": changed.float(), "tis_abs": (ratio - 1).abs()}


def vanilla_tis_function(
    args: Options,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """Truncated importance sampling: pg_loss * clamp(r, tis_clip_low, tis_clip).

    Args:
        args: Reads `tis_clip` and `tis_clip_low`.
        pg_loss: `[T]` per-token loss.
        train_log_probs: B rows `[T_i]` under the training engine's old policy, nats.
        rollout_log_probs: B rows `[T_i]` under the engine that sampled, nats.
        loss_masks: B whole-response masks; returned as they are.
        **kwargs: What other corrections need (`total_lengths`, `response_lengths`, ...).

    Returns:
        The corrected loss, the same masks, and "tis" (r before truncation), "tis_clipfrac", "tis_abs".

    Reference:
        F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    weights = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weights, loss_masks, _metrics(ratio, weights != ratio)


def icepop_function(
    args: Options,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """Clip-or-pop: a token whose r lies outside [tis_clip_low, tis_clip] weighs 0, the others weigh r.

    The host's function: popped tokens stay in every count. Arguments and results are those of `vanilla_tis_function`.

    Reference:
        Ling Team, "Every Step Evolves" (IcePop), arXiv 2510.18855.
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    inside = _is_inside(args, ratio)
    return torch.where(inside, pg_loss * ratio, 0.0), loss_masks, _metrics(ratio, ~inside)


def icepop_rejection_function(
    args: Options,
    *,
    local_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """`icepop_function`, with popped tokens taken out of the masks, so that `--rejected-tokens` decides on the counts.

    With "keep" it is the paper's objective. `local_masks` and the masks that are left are B rows `[T_i]` of this rank.
    """
    pg_loss, _, metrics = icepop_function(args, **kwargs)
    return pg_loss, _keep(local_masks, _is_inside(args, metrics["tis"])), metrics


def geometric_rejection_function(
    args: Options,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    local_masks: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """Sequence-level rejection: a row whose geometric mean of r lies outside [tis_clip_low, tis_clip] is rejected.

    The mean is exp(sum_t m_it log r_it / m_i) over the whole response; the tokens of other rows keep their loss. A
    context-parallel collective. Arguments and results are those of `vanilla_tis_function`, with "tis" the row's mean
    on each of its tokens; `local_masks` and the masks that are left are B rows `[T_i]` of this rank.

    Reference:
        J. Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
        2025 (geometric sequence masking).
    """
    local = list(local_masks)
    log_ratio = concat(train_log_probs) - concat(rollout_log_probs)
    active = concat(local) != 0
    sums = row_sums(torch.where(active, log_ratio, 0.0).to(torch.float64), local)
    means = all_reduce_with_cp(sums) / one_for_zero(mask_sums(loss_masks)).to(sums.device)
    ratio = safe_exp(repeat_over_tokens(means, local)).detach()
    inside = _is_inside(args, ratio)
    return torch.where(inside, pg_loss, 0.0), _keep(local, inside), _metrics(ratio, ~inside)


BUILT_IN: dict[str, Callable[..., Correction]] = {
    "truncated": vanilla_tis_function,
    "icepop": icepop_rejection_function,
    "geometric_rejection": geometric_rejection_function,
}
"""Values of `--tis-type`."""


def _is_inside(args: Options, ratio: torch.Tensor) -> torch.Tensor:
    return (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)


def _keep(local_masks: Sequence[torch.Tensor], inside: torch.Tensor) -> list[torch.Tensor]:
    return [
        mask * part.to(mask.dtype) for mask, part in zip(local_masks, split_like(inside, local_masks), strict=True)
    ]
