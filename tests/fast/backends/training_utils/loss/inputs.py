"""Deterministic inputs of the loss snapshots, in closed form so that no random generator stands behind them."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from miles.backends.training_utils.loss_aggregation import StepCounts
from tests.fast import oracle
from tests.fast.oracle import Row

VOCAB = 7
ROWS = [  # two groups of three; short and long, holes in the masks, the last row without an active token
    Row.of([1, 1], [0] * 2, group=3),
    Row.of([1, 0, 1, 1, 1, 1], [0] * 6, group=3, prompt_length=4),
    Row.of([1], [0], group=3, prompt_length=1),
    Row.of([0, 1, 1], [0] * 3, group=8),
    Row.of([1, 1, 1, 0, 1], [0] * 5, group=8, prompt_length=3),
    Row.of([0, 0], [0] * 2, group=8),
]
CUT = [[[0, 3, 5], [4]], [[1, 2], []]]
"""Two ranks of two micro-batches, one of them empty; both groups are split over ranks."""


def wave(seed: float, i: int, t: int, k: int = 0) -> float:
    """A number in (-1, 1) that depends on all of its arguments."""
    return math.sin(1.7 * seed + 2.3 * i + 1.1 * t + 0.7 * k + 0.31 * i * t + 0.13 * t * k)


@dataclass
class Step:
    """One optimizer step: `[row][t]` numbers, and the logits that are differentiated."""

    rows: Sequence[Row] = field(default_factory=lambda: ROWS)
    spread: float = 0.5

    def tokens(self, i: int) -> list[int]:
        return [(3 * i + 5 * p + p * p) % VOCAB for p in range(self.rows[i].total_length)]

    def logits(self, i: int) -> list[list[float]]:
        return [[1.5 * wave(0, i, p, v) for v in range(VOCAB)] for p in range(self.rows[i].total_length)]

    def column(self, name: str, i: int) -> list[float]:
        """Log-probs near the present policy's own, advantages of both signs, values and returns around zero."""
        seed, scale = {
            "log_probs": (1, self.spread),
            "rollout_log_probs": (2, self.spread),
            "ref_log_probs": (3, 2 * self.spread),
            "advantages": (4, 2.0),
            "values": (5, 1.0),
            "returns": (6, 1.0),
        }[name]
        noise = [scale * wave(seed, i, t) for t in range(self.rows[i].response_length)]
        if "log_probs" not in name:
            return noise
        return [own + x for own, x in zip(self.own_log_probs(i), noise, strict=True)]

    def own_log_probs(self, i: int) -> list[float]:
        row, logits, tokens = self.rows[i], self.logits(i), self.tokens(i)
        result = []
        for t in range(row.response_length):
            z = logits[row.prompt_length + t - 1]
            result.append(z[tokens[row.prompt_length + t]] - math.log(sum(map(math.exp, z))))
        return result

    def head(self, i: int) -> list[list[float]]:
        """Value head outputs `[total_length][1]`."""
        return [[1.2 * wave(7, i, p)] for p in range(self.rows[i].total_length)]

    def counts(self) -> StepCounts:
        rows = self.rows
        return StepCounts(len(oracle.rollouts(rows)), len(oracle.groups(rows)), oracle.num_tokens(rows))


COLUMNS = ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "values", "returns")


def micro_batch(args: Namespace, step: Step, indices: Sequence[int]) -> tuple[dict[str, Any], dict[int, torch.Tensor]]:
    """A micro-batch of the rows, and the leaf logits of each row `[total_length, V]` (float32)."""
    rows = step.rows
    source = step.head if args.loss_type == "value_loss" else step.logits
    leaves = {i: torch.tensor(source(i), requires_grad=True) for i in indices}
    group_sums = {i: sum(sum(other.mask) for other in rows if other.group == rows[i].group) for i in indices}
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.tensor(step.tokens(i)) for i in indices],
        "total_lengths": [rows[i].total_length for i in indices],
        "response_lengths": [rows[i].response_length for i in indices],
        "loss_masks": [torch.tensor(rows[i].mask) for i in indices],
        "prompt_mask_sums": torch.tensor([group_sums[i] for i in indices], dtype=torch.int64),
        "step_counts": step.counts(),
    }
    for name in COLUMNS:
        batch[name] = [torch.tensor(step.column(name, i), dtype=torch.float32) for i in indices]
    return batch, leaves


def packed(leaves: dict[int, torch.Tensor], width: int) -> torch.Tensor:
    """Logits `[1, T, V]`; one pad position where there are no rows."""
    if not leaves:
        return torch.zeros(1, 1, width, requires_grad=True)
    return torch.cat(list(leaves.values()))[None]
