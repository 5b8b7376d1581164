"""What a host makes of random batches without any new flag, written to a file: `python record.py FILE`.

Run on an untouched and on a changed host, the files' contents have to be equal bit for bit: converted data, shards,
gradients, logged metrics, the rollout log, and what `loss_function` and the log aggregation return.
"""

from __future__ import annotations

import logging
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import random_plans
import world
from cuts import SHAPES, Shape, schedules
from host import Host, find
from step import Outcome, Plan

KL = (("use_kl_loss", True), ("kl_loss_coef", 0.1), ("kl_loss_type", "low_var_kl"))
TIS = (("use_rollout_logprobs", False), ("use_tis", True), ("tis_clip", 1.2))
LEGACY = ("--calculate-per-token-loss",)
ENTROPY = ("--entropy-coef", "0.05")

SETTINGS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]] = {
    "default": ((), ()),
    "per-token": (LEGACY, ()),
    "entropy": (ENTROPY, ()),
    "entropy-per-token": ((*LEGACY, *ENTROPY), ()),
    "kl": ((), KL),
    "kl-per-token": (LEGACY, KL),
    "tis": ((), TIS),
    "tis-per-token": (LEGACY, TIS),
    "tis-kl-entropy": (ENTROPY, (*TIS, *KL)),
    "rejection": ((), (*TIS, ("custom_tis_function_path", "plugins.reject_every_third"))),
    "rejection-per-token": (LEGACY, (*TIS, ("custom_tis_function_path", "plugins.reject_every_third"))),
    "reducer": (("--custom-pg-loss-reducer-function-path", "plugins.seventh"), ()),
    "sft": (("--loss-type", "sft_loss"), ()),
    "sft-per-token": ((*LEGACY, "--loss-type", "sft_loss"), ()),
    "balanced": (("--balance-data",), ()),
    "gspo": (("--advantage-estimator", "gspo"), ()),
}
"""Flags, and what is set behind the host's validation because it would ask for files."""


def plans_of(shape: Shape) -> Iterator[tuple[str, Plan]]:
    """Named plans: every setting with every micro-batch schedule, fully masked rows among them."""
    for seed, (name, (flags, overrides)) in enumerate(SETTINGS.items(), start=11):
        rows = random_plans.rows(seed)
        draw = random.Random(seed + 2)
        columns = tuple(
            (column, tuple(tuple(draw.gauss(-3, 0.4) for _ in range(row.response_length)) for row in rows))
            for column in ("log_probs", "ref_log_probs")
        )
        for schedule in schedules(shape, rows):
            plan = random_plans.plan(seed, rows, shape, (*flags, *schedule), overrides=overrides, columns=columns)
            yield f"{name} {' '.join(map(str, shape))} {' '.join(schedule)}", plan


def record(host: Host) -> dict[str, Outcome | str]:
    """Outcome of every plan by name, or the error it ended in."""
    found: dict[str, Outcome | str] = {}
    for shape in SHAPES:
        if shape[0] in host.backends:
            names, plans = zip(*plans_of(shape), strict=True)
            outcomes = world.run(host, plans)
            found |= {name: x if isinstance(x, Outcome) else str(x) for name, x in zip(names, outcomes, strict=True)}
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    recorded = {name: x if isinstance(x, str) else vars(x) for name, x in record(find()).items()}
    with open(sys.argv[1], "wb") as file:
        pickle.dump(recorded, file)
