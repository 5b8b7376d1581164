"""A user's own plug-ins of the policy loss under the modes: a custom reducer, importance weights, rejected tokens."""

from __future__ import annotations

import random

import numpy as np
import policy
import pytest
import random_plans
import world
from cuts import SHAPES, Shape, schedules
from host import Host
from step import Outcome, Plan

TIS_CLIP = 1.1
TIS = (("use_rollout_logprobs", False), ("use_tis", True), ("tis_clip", TIS_CLIP))
REJECTION = (*TIS, ("custom_tis_function_path", "plugins.reject_every_third"))
REDUCER = ("--custom-pg-loss-reducer-function-path", "plugins.seventh")
MODES: dict[str, tuple[str, ...]] = {
    "sample_mean": ("--loss-aggregation", "sample_mean"),
    "prompt_mean": ("--loss-aggregation", "prompt_mean"),
    "token_mean": ("--loss-aggregation", "token_mean"),
    "constant": ("--loss-aggregation", "constant", "--loss-aggregation-divisor", "6.5"),
}
ROOM = 2e-5

all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}-dp{shape[1]}-cp{shape[2]}")


def plans_of(shape: Shape, flags: tuple[str, ...], overrides: tuple = ()) -> list[Plan]:
    rows = random_plans.rows(3)
    draw = random.Random(8)
    old = tuple(
        tuple(x + draw.gauss(0, 0.3) for x in row) for row in random_plans.plan(3, rows, shape, ()).old_log_probs
    )
    columns = (("log_probs", old),) if overrides else ()
    return [
        random_plans.plan(3, rows, shape, (*flags, *schedule), overrides=overrides, columns=columns)
        for schedule in schedules(shape, rows)
    ]


def run(host: Host, plans: list[Plan]) -> list[Outcome]:
    if plans[0].backend not in host.backends:
        pytest.skip("the host has no such backend")
    outcomes = world.run(host, plans)
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), outcome
    return outcomes


@all_shapes
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token_mean"])
def check_a_custom_reducer_comes_before_every_mode(host: Host, mode: str, shape: Shape) -> None:
    before = run(host, plans_of(shape, REDUCER))
    after = run(host, plans_of(shape, (*REDUCER, *MODES[mode])))
    for ours, theirs in zip(after, before, strict=True):
        assert ours.metrics[0]["pg_loss"] == pytest.approx(theirs.metrics[0]["pg_loss"], rel=ROOM)
        np.testing.assert_allclose(ours.gradients[0], theirs.gradients[0], rtol=ROOM, atol=ROOM)


@all_shapes
@pytest.mark.parametrize(
    ("mode", "overrides"),
    [pytest.param(mode, TIS, id=f"{mode}-weights") for mode in MODES]
    # Under the sample mean the hosts differ in whether a rejected token leaves the denominator.
    + [pytest.param(mode, REJECTION, id=f"{mode}-rejection") for mode in MODES if mode != "sample_mean"],
)
def check_importance_sampling(host: Host, mode: str, overrides: tuple, shape: Shape) -> None:
    plans = plans_of(shape, MODES[mode], overrides)
    question = {"rejected": True} if overrides is REJECTION else {"tis_clip": TIS_CLIP}
    divisor = 6.5 if mode == "constant" else None
    for plan, outcome in zip(plans, run(host, plans), strict=True):
        gradient, value = policy.pg_step(plan, mode, divisor, **question)
        assert outcome.metrics[0]["pg_loss"] == pytest.approx(value, rel=ROOM, abs=ROOM)
        np.testing.assert_allclose(outcome.gradients[0], gradient, rtol=0, atol=ROOM * (1 + np.abs(gradient).max()))
