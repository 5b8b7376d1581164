"""The policy loss of a plan in float64: one table, no micro-batches, no ranks; weights from the exact fractions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import oracle
import torch
from oracle import Row
from step import Plan, entries, vocabulary

EPS_CLIP = 0.2

Columns = list[torch.Tensor]
"""Per-token values, one tensor per row."""


def mean(rows: Sequence[Row], columns: Columns, mode: str, divisor: float | None = None) -> torch.Tensor:
    """The scalar that the mode names of per-token values, by the exact weight of each token."""
    terms = [
        float(weight) * x
        for weights, column in zip(oracle.weights(rows, mode, divisor), columns, strict=True)
        for weight, x in zip(weights, column, strict=True)
        if weight
    ]
    return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)


def pg_step(
    plan: Plan, mode: str, divisor: float | None = None, *, tis_clip: float | None = None, rejected: bool = False
) -> tuple[np.ndarray, float]:
    """Gradient and value of the policy-gradient term alone, of a plan of one step.

    Args:
        plan: Its `log_probs` column, if it has one, is the old policy, and `old_log_probs` is the rollout's.
        mode: Of the term.
        divisor: Of `constant`.
        tis_clip: Multiply each token by its truncated importance weight of old policy over rollout.
        rejected: Leave out what `plugins.reject_every_third` rejects; denominators are those of all tokens.
    """
    table, log_probs = _log_probs(plan)
    rollout = [_float32(x) for x in plan.old_log_probs]
    old = [_float32(x) for x in dict(plan.columns).get("log_probs", plan.old_log_probs)]
    advantages = [_float32(x) for x in plan.advantages]
    columns = [torch.maximum(*_surrogates(o - n, a)) for o, n, a in zip(old, log_probs, advantages, strict=True)]
    if tis_clip is not None:
        weights = [(o - r).exp().clamp(max=tis_clip) for o, r in zip(old, rollout, strict=True)]
        columns = [x * w for x, w in zip(columns, weights, strict=True)]
    if rejected:
        columns = [x * (torch.arange(len(x)) % 3 != 1) for x in columns]
    value = mean(plan.rows, columns, mode, divisor)
    value.backward()
    return table.grad.numpy(), float(value)


def _log_probs(plan: Plan, part: slice = slice(None)) -> tuple[torch.Tensor, Columns]:
    """The table as a float64 leaf, and the log-probability of each response token."""
    size = vocabulary(plan.rows)
    table = torch.zeros(size, size) if plan.table is None else plan.table
    table = table.to(torch.float64).requires_grad_()
    columns = []
    for row in entries(plan.rows)[part]:
        before, tokens = (torch.tensor(ids) for ids in zip(*row, strict=True))
        columns.append(table[before].log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
    return table, columns


def expected_steps(
    plan: Plan, mode: str, divisor: float | None = None, *, other: str = "sample_mean", entropy_coef: float = 0.0
) -> list[tuple[np.ndarray, dict[str, float]]]:
    """What each optimizer step has to come to: gradient `[V, V]` and metrics.

    Args:
        plan: The rows and their numbers; its cut is ignored.
        mode: Of the policy-gradient term.
        divisor: Of `constant`.
        other: Mean of every metric and term but the policy-gradient one.
        entropy_coef: Weight of the entropy bonus.
    """
    size = len(plan.rows) // plan.num_steps  # the rows are made so that steps of equally many rollouts have that
    parts = [slice(start, start + size) for start in range(0, len(plan.rows), size)]
    return [_expected(plan, part, mode, divisor, other, entropy_coef) for part in parts]


def _expected(
    plan: Plan, part: slice, mode: str, divisor: float | None, other: str, entropy_coef: float
) -> tuple[np.ndarray, dict[str, float]]:
    rows = plan.rows[part]
    table, log_probs = _log_probs(plan, part)
    old = [_float32(x) for x in plan.old_log_probs[part]]
    advantages = [_float32(x) for x in plan.advantages[part]]
    kl = [o - n for o, n in zip(old, log_probs, strict=True)]
    pairs = [_surrogates(k, a) for k, a in zip(kl, advantages, strict=True)]
    logits = [table[[before for before, _ in row]] for row in entries(plan.rows)[part]]
    entropy = [-(x.softmax(-1) * x.log_softmax(-1)).sum(-1) for x in logits]
    pg_loss = mean(rows, [torch.maximum(*pair) for pair in pairs], mode, divisor)
    loss = pg_loss - entropy_coef * mean(rows, entropy, other)
    loss.backward()
    metrics: dict[str, torch.Tensor] = {
        "loss": loss,
        "pg_loss": pg_loss,
        "entropy_loss": mean(rows, entropy, other),
        "pg_clipfrac": mean(rows, [(b > a).double() for a, b in pairs], other),
        "ppo_kl": mean(rows, kl, other),
    }
    if len(oracle.rollouts(rows)) == len(rows):  # of several rows the hosts add the ratios up
        by_row = _effective_sizes(rows, kl)
        metrics["ess_ratio"] = mean(rows, by_row, "token_mean" if "token_mean" in (mode, other) else other)
    return table.grad.numpy(), {name: float(value) for name, value in metrics.items()}


def _float32(values: Sequence[float]) -> torch.Tensor:
    """What the hosts keep in float32, exactly."""
    return torch.tensor(values, dtype=torch.float32).to(torch.float64)


def _surrogates(kl: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ratio = (-kl).exp()
    return -ratio * advantages, -ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP) * advantages


def _effective_sizes(rows: Sequence[Row], kl: Columns) -> Columns:
    """Each row's effective share of its tokens, on every token, so that a mean over tokens weighs rows by length."""
    columns = []
    for row, values in zip(rows, kl, strict=True):
        weights = (-values).exp()[torch.tensor(row.mask) != 0]
        share = weights.sum() ** 2 / (len(weights) * (weights**2).sum()) if len(weights) else weights.sum()
        columns.append(share.detach().expand(row.response_length))
    return columns
