"""The eighteen cases of `normalization.json` through the host's own functions, at every cut that it can make.

Value (the logged loss) and gradient are compared with exact fractions. Ratio 1 and advantage minus the value make the
policy loss of a token its value.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import world
from cuts import SHAPES, fits, schedules
from host import Host
from oracle import Row
from step import Outcome, Plan, entries, has_rollouts, vocabulary

CASES = json.loads((Path(__file__).parents[2] / "fast" / "data" / "normalization.json").read_text())
TOLERANCE = 1e-5  # the hosts sum float32; values are small integers


def rows_of(case: dict[str, Any]) -> tuple[Row, ...]:
    return tuple(
        Row.of(s["mask"], s["values"], group=s["group"], rollout=s["rollout"], prompt_length=1 + i % 3)
        for i, s in enumerate(case["samples"])
    )


def plan_of(case: dict[str, Any], shape: tuple[str, int, int], flags: tuple[str, ...]) -> Plan:
    rows = rows_of(case)
    uniform = -math.log(vocabulary(rows))
    divisor = () if case["divisor"] is None else ("--loss-aggregation-divisor", str(case["divisor"]))
    return Plan(
        *shape,
        rows,
        ("--loss-aggregation", case["mode"], *divisor, *flags),
        advantages=tuple(tuple(-float(x) for x in row.values) for row in rows),
        old_log_probs=tuple((uniform,) * row.response_length for row in rows),
    )


def assert_law(case: dict[str, Any], plan: Plan, outcome: Outcome) -> None:
    """The logged values and every token's gradient are what the case says."""
    slope = 1 - 1 / vocabulary(plan.rows)  # d log p / d logit of the token itself, where all are equally likely
    room = TOLERANCE * (1 + abs(case["expected"]))
    for name in ("loss", "pg_loss"):
        assert abs(outcome.metrics[0][name] - case["expected"]) <= room, (name, plan, outcome.metrics)
    weights = oracle.weights(plan.rows, case["mode"], case["divisor"])
    for row, row_weights, where in zip(plan.rows, weights, entries(plan.rows), strict=True):
        for x, weight, entry in zip(row.values, row_weights, where, strict=True):
            right = float(weight * x) * slope
            found = outcome.gradients[0][entry]
            assert abs(found - right) <= TOLERANCE * (1 + abs(right)), ("gradient", entry, found, right, plan)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}-dp{shape[1]}-cp{shape[2]}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def check_case(host: Host, case: dict[str, Any], shape: tuple[str, int, int]) -> None:
    rows = rows_of(case)
    if shape[0] not in host.backends:
        pytest.skip("the host has no such backend")
    if case["id"] == "rows-not-rollouts" and not has_rollouts(host, shape[0]):
        pytest.skip("the host's backend takes every row for a rollout")
    if not fits(shape, rows, case["mode"]):
        pytest.skip("the rows cannot be dealt to so many ranks")
    plans = [plan_of(case, shape, flags) for flags in schedules(shape, rows)]
    for plan, outcome in zip(plans, world.run(host, plans), strict=True):
        if case["id"] == "ragged-groups":
            assert "complete prompt groups" in str(outcome), outcome
            continue
        assert isinstance(outcome, Outcome), f"{plan}\n{outcome}"
        assert_law(case, plan, outcome)


def check_there_are_eighteen_cases() -> None:
    assert len(CASES) == 18
    assert {case["mode"] for case in CASES} == set(oracle.MODES)
