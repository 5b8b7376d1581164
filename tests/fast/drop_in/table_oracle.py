"""What the small hosts have to give, in float64 loops and with the exact weights of `tests.fast.oracle`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.fast import oracle

VOCABULARY = 7
Table = list[list[float]]


def logits_after(token: int) -> list[float]:
    """Return the row of the hosts' table."""
    return [math.sin((token * VOCABULARY + other) * 0.37) for other in range(VOCABULARY)]


def probabilities(token: int) -> list[float]:
    powers = [math.exp(logit) for logit in logits_after(token)]
    return [power / sum(powers) for power in powers]


class Sample:
    """A sample with what a host computes of each of its response tokens."""

    def __init__(self, fields: dict[str, Any]) -> None:
        first = len(fields["tokens"]) - fields["response_length"]
        self.pairs = list(zip(fields["tokens"][first - 1 : -1], fields["tokens"][first:], strict=True))
        self.reward = fields["reward"]
        self.mask = [0] * len(self.pairs) if fields.get("remove_sample") else fields["loss_mask"]
        self.group, self.rollout = fields["group_index"], fields.get("rollout_id")
        differences = zip(self.pairs, fields["rollout_log_probs"], strict=True)
        self.kl = [old - math.log(probabilities(before)[after]) for (before, after), old in differences]

    def row(self, values: Sequence[float]) -> oracle.Row:
        return oracle.Row.of(self.mask, values, group=self.group, rollout=self.rollout)

    @property
    def policy_loss(self) -> list[float]:
        return [-self.reward * math.exp(-kl) for kl in self.kl]

    @property
    def entropy(self) -> list[float]:
        return [-sum(p * math.log(p) for p in probabilities(before)) for before, _ in self.pairs]

    @property
    def is_clipped(self) -> list[float]:
        return [float(abs(kl) > 0.2) for kl in self.kl]


def metrics(samples: Sequence[Sample], mode: str, divisor: float | None) -> dict[str, float]:
    """Return the step's metrics: the mode's value of the policy loss, and sample means of the others."""
    loss = oracle.value([sample.row(sample.policy_loss) for sample in samples], mode, divisor)
    means = {"entropy_loss": "entropy", "pg_clipfrac": "is_clipped", "ppo_kl": "kl"}
    return {"loss": float(loss), "pg_loss": float(loss)} | {
        key: float(oracle.value([sample.row(getattr(sample, name)) for sample in samples], "sample_mean"))
        for key, name in means.items()
    }


def gradient(samples: Sequence[Sample], mode: str, divisor: float | None) -> Table:
    """Return the derivative of the step's loss by the table of logits, by hand.

    With p the softmax of a row, x = -reward * exp(log p[after] - old): dx / dlogit[k] = x * (1[k = after] - p[k]).
    """
    table = [[0.0] * VOCABULARY for _ in range(VOCABULARY)]
    rows = [sample.row(sample.policy_loss) for sample in samples]
    for sample, weights in zip(samples, oracle.weights(rows, mode, divisor), strict=True):
        for (before, after), x, weight in zip(sample.pairs, sample.policy_loss, weights, strict=True):
            for k, p in enumerate(probabilities(before)):
                table[before][k] += float(weight) * x * ((k == after) - p)
    return table
