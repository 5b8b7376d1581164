"""The law, unsplit and in float64: one row after another, one token after another, nothing of the package's reducers.

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
from miles.backends.training_utils.train_actor import build_seeded_gpt
from miles.testing.step import VOCAB_SIZE, Cut, Outcome, Row, Scores, Step
from miles.testing.token_values import FOLLOWS_MODE, PER_TOKEN_ONLY, Term, row_terms
from miles.testing.train_data import make_args, row_tokens


@lru_cache(maxsize=64)
def expected_outcome(step: Step) -> Outcome:
    """Return what any cut of the step has to come to."""
    args = make_args(step, Cut())
    model = build_seeded_gpt(args, VOCAB_SIZE, torch.device("cpu")).double()
    rewards = [row.advantage for row in step.rows]
    if args.normalize_advantages:
        step = replace(step, rows=_whiten(step.rows))
    scores = [score_row(model, row_tokens(step, i), row, args.rollout_temperature) for i, row in enumerate(step.rows)]
    terms = [row_terms(args, step, row, score) for row, score in zip(step.rows, scores, strict=True)]
    # Without an active token the gradient is zero, and still there.
    loss = sum((0.0 * score.logits.sum() for score in scores), torch.zeros((), dtype=torch.float64))
    metrics = {}
    for name, first in terms[0].items():
        average = aggregate(step, [row[name].values for row in terms], _mode_of(first, step.mode))
        metrics[name] = average.item()
        if first.weight:
            loss = loss + first.weight * average
    metrics["loss"] = loss.item()
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    metrics["grad_norm"] = math.sqrt(sum(part.square().sum().item() for part in gradient.values()))
    return Outcome(loss.item(), gradient, metrics | _rollout_metrics(step, scores, rewards))


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


def _mode_of(term: Term, mode: str) -> str:
    if term.average == FOLLOWS_MODE:
        return mode
    return "token_mean" if term.average == PER_TOKEN_ONLY and mode == "token_mean" else "sample_mean"


def aggregate(step: Step, columns: Sequence[Tensor], mode: str) -> Tensor:
    """Return the scalar that a mode names.

    Args:
        step: Gives masks, groups, rollouts and the divisor.
        columns: Values of each row, `[T]`. What stands at a masked token is never looked at.
        mode: A value of `--loss-aggregation`.
    """
    rows = step.rows
    rollouts = [("row", i) if row.rollout is None else row.rollout for i, row in enumerate(rows)]
    if mode == "sample_mean":
        return _mean_over(rows, columns, rollouts)
    if mode == "prompt_mean":
        return _mean_over(rows, columns, [row.group for row in rows])
    total, num_tokens = _sum_over(rows, columns, range(len(rows)))
    if mode == "token_mean":
        return total / num_tokens
    return total / (step.divisor * len(set(rollouts)))


def _mean_over(rows: Sequence[Row], columns: Sequence[Tensor], keys: Sequence[Hashable]) -> Tensor:
    """Mean over the sets of rows that share a key of the token mean in each; one without an active token counts 0."""
    total = torch.zeros((), dtype=torch.float64)
    for key in set(keys):
        inside, num_tokens = _sum_over(rows, columns, [i for i, other in enumerate(keys) if other == key])
        if num_tokens:
            total = total + inside / num_tokens
    return total / len(set(keys))


def _sum_over(rows: Sequence[Row], columns: Sequence[Tensor], members: Sequence[int]) -> tuple[Tensor, int]:
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for i in members:
        for place, bit in enumerate(rows[i].mask):
            if bit:
                total = total + columns[i][place]
                num_tokens += 1
    return total, num_tokens


def _rollout_metrics(step: Step, scores: Sequence[Scores], rewards: Sequence[float]) -> dict[str, float]:
    """The rollout's log: means over rows of what each row is, and of the token mean of its columns."""
    rows = step.rows
    each = {
        "rewards": rewards,
        "raw_reward": rewards,
        "response_lengths": [row.response_length for row in rows],
        "total_lengths": [row.total_length for row in rows],
        "truncated": [0 for _ in rows],
        "advantages": [row.advantage if any(row.mask) else 0.0 for row in rows],
        "returns": [row.advantage if any(row.mask) else 0.0 for row in rows],
    }
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns"):
        columns = [getattr(row, name) for row in rows]
        if None not in columns:
            each[name] = [_token_mean(column, row) for column, row in zip(columns, rows, strict=True)]
    if rows[0].log_probs is None and step.loss == "policy":
        each["log_probs"] = [_token_mean(one.log_probs.tolist(), row) for one, row in zip(scores, rows, strict=True)]
    return {f"rollout/{name}": sum(values) / len(rows) for name, values in each.items()}


def _token_mean(values: Sequence[float], row: Row) -> float:
    active = [value for value, bit in zip(values, row.mask, strict=True) if bit]
    return sum(active) / max(len(active), 1)
