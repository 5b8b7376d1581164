"""What each loss and metric is at one token, in float64, straight from its formula; no reduction over rows.

Shapes: T response tokens of one row.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.testing.step import CustomLoss, Row, Scores, Step

FOLLOWS_MODE = "mode"
"""Averaged as `--loss-aggregation` says."""

PER_TOKEN_ONLY = "default"
"""The token mean under `token_mean`, the sample mean in every other mode."""

SAMPLE_MEAN = "sample_mean"
"""The sample mean whatever the mode."""


@dataclass(frozen=True)
class Term:
    """One row's values of a metric, or of a part of the loss.

    Attributes:
        values: float64 `[T]`.
        average: How they become one number over the step.
        weight: Factor with which they are part of the loss; 0: logged only.
    """

    values: Tensor
    average: str = SAMPLE_MEAN
    weight: float = 0.0


def row_terms(args: Namespace, step: Step, row: Row, scores: Scores) -> dict[str, Term]:
    """Return the terms of one row by metric name; every row of a step has the same names."""
    if isinstance(step.loss, CustomLoss):
        return _custom_terms(step.loss, scores, row)
    formulas: dict[str, Callable[[Namespace, Row, Scores], dict[str, Term]]] = {
        "policy": _policy_terms,
        "sft": _sft_terms,
        "value": _value_terms,
    }
    return formulas[step.loss](args, row, scores)


def _custom_terms(loss: CustomLoss, scores: Scores, row: Row) -> dict[str, Term]:
    values = loss.definition(scores, row)
    values = values if isinstance(values, Mapping) else {"loss": values}
    terms = {name: Term(value, PER_TOKEN_ONLY) for name, value in values.items()}
    return terms | {"loss": replace(terms["loss"], average=FOLLOWS_MODE, weight=1.0)}


def _sft_terms(args: Namespace, row: Row, scores: Scores) -> dict[str, Term]:
    return {"loss": Term(-scores.log_probs, FOLLOWS_MODE, 1.0)}


def _value_terms(args: Namespace, row: Row, scores: Scores) -> dict[str, Term]:
    """max((v - R)^2, (v' - R)^2), where v' is v moved at most `value_clip` away from the old prediction."""
    value, old, target = scores.logits[:, 0], _column(row, "values"), _column(row, "returns")
    clipped = torch.minimum(torch.maximum(value, old - args.value_clip), old + args.value_clip)
    loss = torch.maximum((value - target) ** 2, (clipped - target) ** 2)
    was_clipped = ((value - old).abs() > args.value_clip).double()
    return {
        "value_loss": Term(loss, FOLLOWS_MODE, 1.0),
        "value_clipfrac": Term(was_clipped, PER_TOKEN_ONLY),
    }


def _policy_terms(args: Namespace, row: Row, scores: Scores) -> dict[str, Term]:
    """PPO's clipped surrogate with w = pi / pi_old, its metrics, and the optional terms that `args` asks for."""
    old = _old_log_probs(args, row, scores)
    log_ratio = scores.log_probs - old
    if args.advantage_estimator == "gspo":
        log_ratio = _row_mean(log_ratio, row)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    unclipped, clipped = -ratio * row.advantage, -clipped_ratio * row.advantage
    surrogate = torch.where(clipped > unclipped, clipped, unclipped)
    if args.eps_clip_c is not None and row.advantage < 0:
        surrogate = surrogate.clamp(max=-args.eps_clip_c * row.advantage)
    trained = old if row.log_probs is None else _column(row, "log_probs")
    mismatch = _mismatch_terms(row, trained)
    if args.use_tis:
        tis = (trained - _column(row, "rollout_log_probs")).exp()
        kept = tis.clamp(args.tis_clip_low, args.tis_clip)
        surrogate = surrogate * kept
        mismatch |= {"tis": Term(tis), "tis_abs": Term((tis - 1).abs()), "tis_clipfrac": Term((kept != tis).double())}
    if args.use_tis or args.get_mismatch_metrics:
        mismatch["ois"] = Term(ratio)
    effective = _row_mean(ratio, row) ** 2 / _row_mean(ratio**2, row).clamp_min(torch.finfo(torch.float64).tiny)
    terms = {
        "pg_loss": Term(surrogate, FOLLOWS_MODE, 1.0),
        "entropy_loss": Term(scores.entropy, SAMPLE_MEAN, -args.entropy_coef),
        "pg_clipfrac": Term((clipped > unclipped).double()),
        "ppo_kl": Term(-log_ratio),
        "ess_ratio": Term(effective, PER_TOKEN_ONLY),
    }
    if args.use_kl_loss:
        terms["kl_loss"] = Term(_kl(args, row, scores.log_probs, old), SAMPLE_MEAN, args.kl_loss_coef)
    return terms | mismatch


def _old_log_probs(args: Namespace, row: Row, scores: Scores) -> Tensor:
    if args.use_rollout_logprobs:
        return _column(row, "rollout_log_probs")
    return scores.log_probs.detach() if row.log_probs is None else _column(row, "log_probs")


def _mismatch_terms(row: Row, trained: Tensor) -> dict[str, Term]:
    """How far the engine that sampled is from the one that trains, before the step."""
    if row.rollout_log_probs is None:
        return {}
    log_ratio = _column(row, "rollout_log_probs") - trained
    return {
        "train_rollout_logprob_abs_diff": Term(log_ratio.abs()),
        "train_rollout_kl": Term((torch.exp(-log_ratio) - 1 + log_ratio).clamp(-10, 10)),
    }


def _kl(args: Namespace, row: Row, log_probs: Tensor, old: Tensor) -> Tensor:
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
