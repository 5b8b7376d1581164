"""The host's rollout log under `prompt_mean`: it runs, and logs what it logs without the new columns."""

from __future__ import annotations

import pytest
import random_plans
import world
from cuts import SHAPES, Shape
from host import Host
from step import Outcome

NEW_COLUMNS = ("prompt_group_indices", "prompt_mask_sums")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}-dp{shape[1]}-cp{shape[2]}")
def check_the_new_columns_are_left_out(host: Host, shape: Shape) -> None:
    if shape[0] not in host.backends:
        pytest.skip("the host has no such backend")
    rows = random_plans.rows(4)
    plans = [random_plans.plan(4, rows, shape, flags) for flags in ((), ("--loss-aggregation", "prompt_mean"))]
    default, ours = world.run(host, plans)
    assert isinstance(default, Outcome), default
    assert isinstance(ours, Outcome), ours
    assert set(NEW_COLUMNS) <= ours.train_data.keys() - default.train_data.keys()
    assert ours.rollout_log.keys() == default.rollout_log.keys()
    assert default.rollout_log["rollout/advantages"] != 0
    for name, value in default.rollout_log.items():
        assert ours.rollout_log[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
