"""What each loss and metric is at one token, in float64, straight from its formula; no reduction over rows.

Shapes: T response tokens of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.testing.corrections import correct_row
from miles.testing.step import CustomLoss, Row, Scores, Step
from miles.utils.options import Options

MAIN_TERM = "main term"
"""As `--loss-aggregation` or the custom reducer says, over kept tokens, with loss weights."""

DEFAULT_LOSS = "default"
"""The token mean under `token_mean`, the sample mean in every other mode, with loss weights."""

KEPT_TOKENS = "kept tokens"
"""The sample mean over kept tokens, whatever the mode."""

ALL_TOKENS = "all tokens"
"""The sample mean over active tokens, rejected or not, whatever the mode."""

ALL_TOKENS_BY_MODE = "all tokens by mode"
"""The token mean over active tokens under `token_mean`, their sample mean in every other mode."""


@dataclass(frozen=True)
class Term:
    """One row's values of a metric, or of a part of the loss.

    Attributes:
        values: float64 `[T]`.
        average: How they become one number over the step.
        weight: Factor with which they are part of the loss; 0: logged only.
    """

    values: Tensor
    average: str = ALL_TOKENS
    weight: float = 0.0


@dataclass(frozen=True)
class RowTerms:
    """One row's part of everything that a step computes.

    Attributes:
        terms: By metric name; every row of a step has the same names.
        kept: T entries 0 and 1, the active tokens that a correction left.
    """

    terms: Mapping[str, Term]
    kept: Sequence[int]


def row_terms(args: Options, step: Step, row: Row, scores: Scores) -> RowTerms:
    """Return the terms of one row."""
    if isinstance(step.loss, CustomLoss):
        return RowTerms(_custom_terms(step.loss, scores, row), row.mask)
    if step.loss == "policy":
        return _policy_terms(args, step, row, scores)
    return RowTerms(_sft_terms(scores) if step.loss == "sft" else _value_terms(args, row, scores), row.mask)


def _custom_terms(loss: CustomLoss, scores: Scores, row: Row) -> dict[str, Term]:
    values = loss.definition(scores, row)
    values = values if isinstance(values, Mapping) else {"loss": values}
    return {name: Term(value, DEFAULT_LOSS, float(name == "loss")) for name, value in values.items()}


def _sft_terms(scores: Scores) -> dict[str, Term]:
    return {"loss": Term(-scores.log_probs, DEFAULT_LOSS, 1.0)}


def _value_terms(args: Options, row: Row, scores: Scores) -> dict[str, Term]:
    """max((v - R)^2, (v' - R)^2), where v' is v moved at most `value_clip` away from the old prediction."""
    value, old, target = scores.logits[:, 0], _column(row, "values"), _column(row, "returns")
    clipped = torch.minimum(torch.maximum(value, old - args.value_clip), old + args.value_clip)
    loss = torch.maximum((value - target) ** 2, (clipped - target) ** 2)
    was_clipped = ((value - old).abs() > args.value_clip).double()
    return {
        "value_loss": Term(loss, DEFAULT_LOSS, 1.0),
        "value_clipfrac": Term(was_clipped, DEFAULT_LOSS),
    }


def _policy_terms(args: Options, step: Step, row: Row, scores: Scores) -> RowTerms:
    """PPO's clipped surrogate with w = pi / pi_old, its metrics, and the optional terms that `args` asks for."""
    trained = _trained_log_probs(args, row, scores)
    old = _column(row, "rollout_log_probs") if args.use_rollout_logprobs else trained
    log_ratio = scores.log_probs - old
    if args.advantage_estimator == "gspo":
        log_ratio = _row_mean(log_ratio, row)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    unclipped, clipped = -ratio * row.advantage, -clipped_ratio * row.advantage
    surrogate = torch.where(clipped > unclipped, clipped, unclipped)
    if args.eps_clip_c is not None and row.advantage < 0:
        surrogate = surrogate.clamp(max=-args.eps_clip_c * row.advantage)
    corrected = correct_row(args, step.correction, row, trained)
    effective = _row_mean(ratio, row) ** 2 / _row_mean(ratio**2, row).clamp_min(torch.finfo(torch.float64).tiny)
    auxiliary = {"match": MAIN_TERM, "sample_mean": KEPT_TOKENS}[args.aux_loss_aggregation]
    terms = {
        "pg_loss": Term(surrogate * corrected.factors, MAIN_TERM, 1.0),
        "entropy_loss": Term(scores.entropy, auxiliary, -args.entropy_coef),
        "pg_clipfrac": Term((clipped > unclipped).double(), KEPT_TOKENS),
        "ppo_kl": Term(-log_ratio, KEPT_TOKENS),
        "ess_ratio": Term(effective, ALL_TOKENS_BY_MODE),
    }
    if args.use_kl_loss:
        terms["kl_loss"] = Term(_kl(args, row, scores.log_probs, old), auxiliary, args.kl_loss_coef)
    if args.use_tis or args.get_mismatch_metrics:
        terms["ois"] = Term(ratio)
    mismatch = {**_mismatch_metrics(args, row, trained), **corrected.metrics}
    return RowTerms(terms | {name: Term(values) for name, values in mismatch.items()}, corrected.kept)


def _trained_log_probs(args: Options, row: Row, scores: Scores) -> Tensor:
    """Log-probs under the engine that trains, before the step."""
    if row.log_probs is not None:
        return _column(row, "log_probs")
    return scores.log_probs.detach() if _wants_own(args) else _column(row, "rollout_log_probs")


def _wants_own(args: Options) -> bool:
    """Whether something asks the backend for log-probs of its own."""
    return not args.use_rollout_logprobs or args.get_mismatch_metrics


def _mismatch_metrics(args: Options, row: Row, trained: Tensor) -> dict[str, Tensor]:
    """How far the engine that sampled is from the one that trains, where both are known."""
    if row.rollout_log_probs is None or (row.log_probs is None and not _wants_own(args)):
        return {}
    log_ratio = _column(row, "rollout_log_probs") - trained
    return {
        "train_rollout_logprob_abs_diff": log_ratio.abs(),
        "train_rollout_kl": (torch.exp(-log_ratio) - 1 + log_ratio).clamp(-10, 10),
    }


def _kl(args: Options, row: Row, log_probs: Tensor, old: Tensor) -> Tensor:
    """Schulman's estimators of KL(pi || pi_ref)."""
    log_ratio = log_probs - _column(row, "ref_log_probs")
    third = torch.exp(-log_ratio) - 1 + log_ratio
    estimate = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": third, "low_var_kl": third.clamp(-10, 10)}
    weight = torch.exp(log_probs - old) if args.use_unbiased_kl else 1.0
    return estimate[args.kl_loss_type] * weight


def _row_mean(values: Tensor, row: Row) -> Tensor:
    """Return the mean over the row's active tokens at each of its tokens; 0 where none is active."""
    active = [values[place] for place, bit in enumerate(row.mask) if bit]
    mean = sum(active, values.new_zeros(())) / max(len(active), 1)
    return mean.expand(len(row.mask))


def _column(row: Row, name: str) -> Tensor:
    values = getattr(row, name)
    if values is None:
        raise ValueError(f"this loss needs {name} on every row of the step")
    return torch.tensor(values, dtype=torch.float64)
