"""Every number of the report by plain loops over tokens, in fractions, from the definition in `tests.fast.oracle`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

from tests.fast import oracle
from tests.fast.oracle import MODES, Counting, Row
from tests.fast.tools.aggregation_report.small_dumps import Step


@dataclass
class Answer:
    """One rollout: its rows' tokens, each (is active, weight by mode)."""

    dump: int
    group: tuple[int, int]
    reward: float
    length: int
    tokens: list[tuple[int, dict[str, Fraction]]]
    quarter: int = -1
    advantage: float = 0.0

    def weight(self, mode: str) -> Fraction:
        return sum((weights[mode] for _, weights in self.tokens), Fraction(0))

    @property
    def num_active(self) -> int:
        return sum(bit for bit, _ in self.tokens)


def answers_of(dumps: Sequence[Sequence[Step]], divisor: float, counting: Counting) -> list[Answer]:
    """All rollouts with their quarters and, by group, advantages of GRPO."""
    answers: list[Answer] = []
    for number, steps in enumerate(dumps):
        for step in steps:
            answers += _answers_of_step(number, step, divisor, counting)
    for group in {answer.group for answer in answers}:
        members = [answer for answer in answers if answer.group == group]
        rewards = [answer.reward for answer in members]
        spread = statistics.stdev(rewards) + 1e-6 if len(rewards) > 1 else 1.0
        for answer in members:
            answer.advantage = (answer.reward - statistics.fmean(rewards)) / spread
    return answers


def _answers_of_step(dump: int, step: Step, divisor: float, counting: Counting) -> list[Answer]:
    rows: list[Row] = [row for row, _ in step]
    weights = {mode: oracle.weights(rows, mode, divisor, counting) for mode in MODES}
    answers = []
    for members in oracle.rollouts(rows):
        tokens = [
            (rows[i].mask[t], {mode: Fraction(weights[mode][i][t]) for mode in MODES})
            for i in members
            for t in range(rows[i].response_length)
        ]
        first = members[0]
        answers.append(Answer(dump, (dump, rows[first].group), step[first][1], len(tokens), tokens))
    # From the longest down, of equal ones the later first: so many of N in each quarter that none differs by two.
    descending = sorted(range(len(answers)), key=lambda place: (answers[place].length, place), reverse=True)
    for rank, place in enumerate(descending):
        answers[place].quarter = 3 - math.floor(Fraction(4 * rank, len(answers)))
    return answers


def _quotient(numerator: Any, denominator: Any) -> Any:
    return None if denominator == 0 else numerator / denominator


def _range(values: Iterable[tuple[Fraction | None, int]]) -> dict[str, Any]:
    """Of weights of one token, each as often as there are tokens."""
    tokens = [value for value, count in values for _ in range(count) if value is not None]
    return {"min": min(tokens), "median": statistics.median(tokens), "max": max(tokens)}


def _effective(weights: Iterable[Fraction]) -> Fraction:
    weights = list(weights)
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def expected_report(
    dumps: Sequence[Sequence[Step]], paths: Sequence[str], divisor: float, counting: Counting, top: int
) -> dict[str, Any]:
    """The parts of the report that hold numbers of the data."""
    answers = answers_of(dumps, divisor, counting)
    return {
        "data": _data(dumps, answers),
        "groups": _groups(answers),
        "quarters": [_quarter([each for each in answers if each.quarter == q], answers) for q in range(4)],
        "modes": {mode: _mode(answers, mode, paths, top) for mode in MODES},
        "switches": [_switch(answers, old, new) for old, new in combinations(MODES, 2)],
    }


def _data(dumps: Sequence[Sequence[Step]], answers: Sequence[Answer]) -> dict[str, Any]:
    rows = [row for steps in dumps for step in steps for row, _ in step]
    return {
        "steps": sum(len(steps) for steps in dumps),
        "samples": len(answers),
        "rows": len(rows),
        "rows_by_status": dict(Counter("truncated" if len(row.mask) > 8 else "completed" for row in rows)),
        "response_tokens": sum(len(row.mask) for row in rows),
        "active_tokens": sum(sum(row.mask) for row in rows),
        "fully_masked_samples": sum(answer.num_active == 0 for answer in answers),
        "right_samples": sum(answer.reward == 1 for answer in answers),
        "wrong_samples": sum(answer.reward == 0 for answer in answers),
        "has_loss_weights": any(row.loss_weights is not None for row in rows),
    }


def _groups(answers: Sequence[Answer]) -> dict[str, Any]:
    sizes = Counter(answer.group for answer in answers)
    rewards = {group: {answer.reward for answer in answers if answer.group == group} for group in sizes}
    # Of the sizes 3, 1, 2, 2 and 3, those of 2 and 3 are equally frequent, and the larger one counts as whole.
    return {
        "groups": len(sizes),
        "size": 3,
        "incomplete": sum(size < 3 for size in sizes.values()),
        "larger": 0,
        "one_reward": sum(len(values) == 1 for values in rewards.values()),
        "samples_of_one_reward": sum(sizes[group] for group, values in rewards.items() if len(values) == 1),
    }


def _quarter(members: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    tokens = sum(answer.num_active for answer in members)
    return {
        "samples": len(members),
        "shortest": min(answer.length for answer in members),
        "longest": max(answer.length for answer in members),
        "active_tokens": tokens,
        "share_of_tokens": Fraction(tokens, sum(answer.num_active for answer in answers)),
    }


def _mode(answers: Sequence[Answer], mode: str, paths: Sequence[str], top: int) -> dict[str, Any]:
    total = sum(answer.weight(mode) for answer in answers)
    groups = {answer.group: Fraction(0) for answer in answers}
    for answer in answers:
        groups[answer.group] += answer.weight(mode)
    unmasked = [answer for answer in answers if answer.num_active]
    heaviest = sorted(groups, key=lambda group: -groups[group])[:top]
    return {
        "token_weight": _range((each.weight(mode) / each.num_active, each.num_active) for each in unmasked),
        "token_weight_over_token_mean": _range(
            (_quotient(each.weight(mode), each.weight("token_mean")), each.num_active) for each in unmasked
        ),
        "weight_of_a_step": total / 3,
        "share_by_quarter": [sum(a.weight(mode) for a in answers if a.quarter == q) / total for q in range(4)],
        "share_by_reward": {
            name: sum(answer.weight(mode) for answer in answers if answer.reward == reward) / total
            for name, reward in (("right", 1), ("wrong", 0))
        },
        "effective_samples": _effective(answer.weight(mode) for answer in answers),
        "effective_prompts": _effective(groups.values()),
        "heaviest_prompts": [
            {
                "dump": paths[dump],
                "group_index": index,
                "samples": sum(answer.group == (dump, index) for answer in answers),
                "share": groups[dump, index] / total,
            }
            for dump, index in heaviest
        ],
        "gradient_weight": _gradient_weight(answers, mode),
    }


def _gradient_weight(answers: Sequence[Answer], mode: str) -> dict[str, Any]:
    magnitude = sum(float(answer.weight(mode)) * abs(answer.advantage) for answer in answers)
    per_token = magnitude / sum(answer.num_active for answer in answers)

    def cell(members: Iterable[Answer]) -> dict[str, Any]:
        members = list(members)
        total = sum(float(answer.weight(mode)) * answer.advantage for answer in members)
        tokens = sum(answer.num_active for answer in members)
        one = _quotient(total, tokens)
        return {"sum": total, "share": total / magnitude, "per_token": None if one is None else one / per_token}

    quarters = [
        {
            "right": cell(each for each in answers if each.quarter == q and each.reward == 1),
            "wrong": cell(each for each in answers if each.quarter == q and each.reward == 0),
            "all": cell(each for each in answers if each.quarter == q),
        }
        for q in range(4)
    ]
    difference = quarters[3]["all"]["sum"] - quarters[0]["all"]["sum"]
    return {
        "magnitude": magnitude,
        "quarters": quarters,
        "longest_minus_shortest": {"sum": difference, "share": difference / magnitude},
    }


def _switch(answers: Sequence[Answer], old: str, new: str) -> dict[str, Any]:
    def ratio(members: Iterable[Answer]) -> Any:
        members = list(members)
        return _quotient(sum(each.weight(new) for each in members), sum(each.weight(old) for each in members))

    by_quarter = [ratio(answer for answer in answers if answer.quarter == q) for q in range(4)]
    return {"from": old, "to": new, "all": ratio(answers), "by_quarter": by_quarter}
