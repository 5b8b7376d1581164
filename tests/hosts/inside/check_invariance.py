"""Any cut, the same step: random rows through the host against a float64 oracle that knows no cut.

Every logged metric is compared as well: under `token_mean` the policy-gradient ones are means over tokens and all
others stay means over samples. `default` and `legacy` use no new flag: they hold on an untouched host too, and show
that this harness measures what it should.
"""

from __future__ import annotations

import numpy as np
import policy
import pytest
import random_plans
import world
from cuts import SHAPES, Shape, fits, schedules
from host import Host
from step import Outcome, Plan, has_rollouts

DIVISOR = 6.5
ENTROPY = ("--entropy-coef", "0.05")
SETTINGS: dict[str, tuple[tuple[str, ...], dict]] = {
    "default": ((), {"mode": "sample_mean"}),
    "default-entropy": (ENTROPY, {"mode": "sample_mean", "entropy_coef": 0.05}),
    "legacy": (("--calculate-per-token-loss",), {"mode": "token_mean", "other": "token_mean"}),
    "sample_mean": (("--loss-aggregation", "sample_mean"), {"mode": "sample_mean"}),
    "prompt_mean": (("--loss-aggregation", "prompt_mean"), {"mode": "prompt_mean"}),
    "prompt_mean-entropy": (
        ("--loss-aggregation", "prompt_mean", *ENTROPY),
        {"mode": "prompt_mean", "entropy_coef": 0.05},
    ),
    "prompt_mean-balanced": (("--loss-aggregation", "prompt_mean", "--balance-data"), {"mode": "prompt_mean"}),
    "token_mean": (("--loss-aggregation", "token_mean"), {"mode": "token_mean"}),
    "constant": (
        ("--loss-aggregation", "constant", "--loss-aggregation-divisor", str(DIVISOR)),
        {"mode": "constant", "divisor": DIVISOR},
    ),
}
"""Flags, and what the oracle is asked."""
GRADIENT_ROOM = 2e-5
METRIC_ROOM = 2e-5


def assert_steps(plan: Plan, outcome: Outcome, question: dict) -> None:
    expected = policy.expected_steps(plan, **question)
    assert len(outcome.gradients) == len(outcome.metrics) == len(expected)
    for (gradient, metrics), found, logged in zip(expected, outcome.gradients, outcome.metrics, strict=True):
        largest = np.abs(found - gradient).max()
        assert largest <= GRADIENT_ROOM * (1 + np.abs(gradient).max()), ("gradient", largest, plan.flags)
        for name, value in metrics.items():
            if name in logged and not (name == "entropy_loss" and logged[name] == 0.0):  # not computed by default
                assert abs(logged[name] - value) <= METRIC_ROOM * (1 + abs(value)), (
                    name,
                    logged[name],
                    value,
                    plan.flags,
                )


def assert_groups_whole(outcome: Outcome) -> None:
    """No prompt group is on two ranks."""
    places = [set(shard["prompt_group_indices"]) for shard in outcome.shards]
    assert sum(map(len, places)) == random_plans.GROUPS == len(set().union(*places))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}-dp{shape[1]}-cp{shape[2]}")
@pytest.mark.parametrize("several", [False, True], ids=["one-row", "several-rows"])
@pytest.mark.parametrize("setting", SETTINGS)
def check_any_cut(host: Host, setting: str, several: bool, shape: Shape) -> None:
    flags, question = SETTINGS[setting]
    if shape[0] not in host.backends:
        pytest.skip("the host has no such backend")
    if several and not has_rollouts(host, shape[0]):
        pytest.skip("the host's backend takes every row for a rollout")
    if setting == "legacy" and shape[0] == "fsdp":
        pytest.skip("the host's FSDP backend drops the token count; --loss-aggregation token_mean keeps it")
    plans = []
    for seed in (1, 2):
        # Under the legacy spelling a fully masked row counts as a token.
        rows = random_plans.rows(seed, masked=setting != "legacy", several=several)
        for num_steps in (1, 2):
            assert fits(shape, rows, question["mode"], num_steps=num_steps)
            for schedule in schedules(shape, rows, num_steps=num_steps):
                plans.append(random_plans.plan(seed, rows, shape, (*flags, *schedule), num_steps=num_steps))
    for plan, outcome in zip(plans, world.run(host, plans), strict=True):
        assert isinstance(outcome, Outcome), f"{plan.flags}, {plan.num_steps} steps\n{outcome}"
        assert_steps(plan, outcome, question)
        if question["mode"] == "prompt_mean":
            assert_groups_whole(outcome)
