"""The definition, unsplit and in float64: one row and one token after another, none of the package's reducers.

Each mode is its own sentence, not the common form that the package computes, so that both agree only by being right.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from miles.backends.experimental.fsdp_utils.models.gpt import GPT
from miles.backends.training_utils.loss_aggregation import MODES
from miles.backends.training_utils.train_actor import build_seeded_gpt
from miles.testing.averages import (
    Masks,
    aggregate,
    aggregate_by_reducer,
    kept_weighing,
    main_weighing,
    plain_weighing,
    rollout_keys,
)
from miles.testing.step import SKIPPED_VALUE, VOCAB_SIZE, Outcome, Row, Scores, Split, Step
from miles.testing.step_facts import step_facts
from miles.testing.token_values import (
    ALL_TOKENS,
    ALL_TOKENS_BY_MODE,
    DEFAULT_LOSS,
    KEPT_TOKENS,
    MAIN_TERM,
    row_terms,
)
from miles.testing.train_data import make_args, row_tokens
from miles.utils.options import Options


@lru_cache(maxsize=256)
def expected_outcome(step: Step) -> Outcome:
    """Return what any split of the step has to come to."""
    args = make_args(step, Split())
    model = build_seeded_gpt(args, VOCAB_SIZE, torch.device("cpu")).double()
    rewards = [row.advantage for row in step.rows]
    if args.normalize_advantages:
        step = replace(step, rows=_whiten(step.rows))
    scores = [score_row(model, row_tokens(step, i), row, args.rollout_temperature) for i, row in enumerate(step.rows)]
    rollout_metrics = _rollout_metrics(step, scores, rewards)
    rows = [row_terms(args, step, row, score) for row, score in zip(step.rows, scores, strict=True)]
    kept = [row.kept for row in rows]
    if MODES[step.mode].counts_tokens and not main_weighing(args, step.rows, kept).total:
        facts = step_facts(args, step, kept, lambda columns: 0.0)
        return Outcome(SKIPPED_VALUE, {}, {"skipped_steps": 1.0, **facts, **rollout_metrics})
    # Without an active token the gradient is zero, and still there.
    loss = sum((0.0 * score.logits.sum() for score in scores), torch.zeros((), dtype=torch.float64))
    main_term = MAIN_TERM if step.loss == "policy" else DEFAULT_LOSS
    facts = step_facts(args, step, kept, lambda columns: _average(args, step, columns, main_term, kept).item())
    metrics = {}
    for name, first in rows[0].terms.items():
        average = _average(args, step, [row.terms[name].values for row in rows], first.average, kept)
        metrics[name] = average.item()
        if first.weight:
            loss = loss + first.weight * average
    metrics["loss"] = loss.item()
    loss.backward()
    gradient = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    metrics["grad_norm"] = math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))
    return Outcome(loss.item(), gradient, metrics | facts | rollout_metrics)


def _average(args: Options, step: Step, columns: Sequence[Tensor], average: str, kept: Masks) -> Tensor:
    """Return the number that a term comes to over the step."""
    rows = step.rows
    if average == MAIN_TERM:
        weighing = main_weighing(args, rows, kept)
        if step.reducer is not None:
            return aggregate_by_reducer(step, step.reducer, columns, kept, weighing)
        return aggregate(step, columns, step.mode, weighing)
    by_mode = "token_mean" if MODES[step.mode].counts_tokens else "sample_mean"
    masks = [row.mask for row in rows]
    mode, weighing = {
        DEFAULT_LOSS: (by_mode, main_weighing(args, rows, masks)),
        KEPT_TOKENS: ("sample_mean", kept_weighing(args, rows, kept)),
        ALL_TOKENS: ("sample_mean", plain_weighing(masks)),
        ALL_TOKENS_BY_MODE: (by_mode, plain_weighing(masks)),
    }[average]
    return aggregate(step, columns, mode, weighing)


def _whiten(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with advantages of mean 0 and (unbiased) variance 1 over the step's active tokens."""
    each = [row.advantage for row in rows for bit in row.mask if bit]
    mean = sum(each) / max(len(each), 1)
    variance = sum((advantage - mean) ** 2 for advantage in each) / max(len(each) - 1, 1)
    return [replace(row, advantage=(row.advantage - mean) / math.sqrt(variance + 1e-8)) for row in rows]


def score_row(model: GPT, tokens: list[int], row: Row, temperature: float) -> Scores:
    """Run the float64 model on one row alone."""
    captured: list[Tensor] = []
    # The model hands out float32 logits; here they are taken before that.
    handle = model.output.register_forward_hook(lambda module, inputs, output: captured.append(output))
    ids = torch.tensor([tokens])
    model(ids, torch.arange(len(tokens))[None], torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens))
    handle.remove()
    first = len(tokens) - row.response_length
    logits = captured[0].reshape(len(tokens), -1)[first - 1 : len(tokens) - 1]
    distribution = (logits / temperature).log_softmax(-1)
    log_probs = distribution.gather(-1, ids[0, first:, None])[:, 0]
    return Scores(log_probs, -(distribution.exp() * distribution).sum(-1), logits)


def _rollout_metrics(step: Step, scores: Sequence[Scores], rewards: Sequence[float]) -> dict[str, float]:
    """The rollout's log: rewards and token means over rollouts, lengths over rows."""
    rows = step.rows
    lengths = {
        "response_lengths": [row.response_length for row in rows],
        "total_lengths": [row.total_length for row in rows],
        "truncated": [0 for _ in rows],
    }
    columns: dict[str, Sequence[Sequence[float]]] = {
        "advantages": [[row.advantage] * len(row.mask) for row in rows],
        "returns": [[row.advantage] * len(row.mask) for row in rows],
    }
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns"):
        of_rows = [getattr(row, name) for row in rows]
        if None not in of_rows:
            columns[name] = of_rows
    if rows[0].log_probs is None and step.loss == "policy":
        columns["log_probs"] = [one.log_probs.tolist() for one in scores]
    each = {name: sum(values) / len(rows) for name, values in lengths.items()}
    each |= {name: _mean_of_rollouts(rows, rewards) for name in ("rewards", "raw_reward")}
    weighing = plain_weighing([row.mask for row in rows])
    for name, column in columns.items():
        tensors = [torch.tensor(values, dtype=torch.float64) for values in column]
        each[name] = aggregate(step, tensors, "sample_mean", weighing).item()
    return {f"rollout/{name}": value for name, value in each.items()}


def _mean_of_rollouts(rows: Sequence[Row], values: Sequence[float]) -> float:
    """Mean over rollouts of the mean over the rows of each."""
    by_rollout: dict[Hashable, list[float]] = {}
    for key, value in zip(rollout_keys(rows), values, strict=True):
        by_rollout.setdefault(key, []).append(value)
    return sum(sum(inside) / len(inside) for inside in by_rollout.values()) / len(by_rollout)
