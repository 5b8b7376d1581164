"""The harness itself: its verdicts and messages, and worlds that never hang."""

import os
import re
import time
from dataclasses import dataclass, replace

import pytest

from miles.testing import (
    FSDPBackend,
    Outcome,
    Row,
    Split,
    Step,
    WorldError,
    check_invariance,
    expected_outcome,
    run_world,
)
from miles.testing.check import differences
from miles.utils.errors import UserError
from tests.fast.testing.plugins import KEEP_NEAR
from tests.fast.testing.steps import make_step, uneven_rows


@dataclass
class Wrong:
    """A backend that is right but for what `spoil` makes of it."""

    spoil: object

    def run_many(self, jobs):
        return [self.spoil(step, split, expected_outcome(step)) for step, split in jobs]


def _per_microbatch_mean(step, split, outcome):
    """Twice the value wherever a rank has several micro-batches, and a long row."""
    several = split.size(step)[1] > 1 and any(row.response_length > 8 for row in step.rows)
    return replace(outcome, value=outcome.value * 2) if several else outcome


def test_the_smallest_failing_cut_is_shown():
    splits = [Split(dp=2, micro_batch_size=1), Split(micro_batch_size=1), Split(micro_batch_size=4), Split()]
    with pytest.raises(AssertionError, match=r"3 of 4 splits on .* fail; the smallest:") as error:
        check_invariance(make_step(), Wrong(_per_microbatch_mean), splits, shrink=False)
    assert "| one process, micro_batch_size 4 (1 ranks, 2 micro-batches, 7 rows):" in str(error.value)
    value = expected_outcome(make_step()).value
    assert f"value: expected {value:.9g}, got {2 * value:.9g}" in str(error.value)
    assert "metric" not in str(error.value)


def test_rows_that_do_not_matter_are_left_out():
    with pytest.raises(AssertionError) as error:
        check_invariance(make_step(), Wrong(_per_microbatch_mean), [Split(micro_batch_size=1)])
    assert "(1 ranks, 2 micro-batches, 2 rows):" in str(error.value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda o: replace(o, metrics={**o.metrics, "ppo_kl": o.metrics["ppo_kl"] * 1.001}),
            "metric ppo_kl: expected",
        ),
        (lambda o: replace(o, metrics={**o.metrics, "ppo_kl": float("nan")}), "metric ppo_kl: expected .*, got nan"),
        (
            lambda o: replace(o, metrics={k: v for k, v in o.metrics.items() if k != "loss"}),
            "metric loss: .* got none",
        ),
        (lambda o: replace(o, metrics={**o.metrics, "new": 1.0}), "metric new: expected none, got 1"),
        (
            lambda o: replace(o, gradient={**o.gradient, "output.weight": o.gradient["output.weight"] * 1.0001}),
            r"gradient output.weight\[\d+, \d+\]: expected .*, got ",
        ),
        (
            lambda o: replace(o, gradient={**o.gradient, "output.weight": o.gradient["output.weight"] * float("nan")}),
            r"gradient output.weight\[\d+, \d+\]: expected .*, got nan",
        ),
    ],
)
def test_every_kind_of_difference_is_named(spoil, said):
    right: Outcome = expected_outcome(make_step())
    assert differences(right, right, rtol=1e-5) == []
    (line,) = differences(right, spoil(right), rtol=1e-5)
    assert re.match(said, line)


def _hang_on_rank_1():
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return "done"


def _fail_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("not mine")
    time.sleep(60)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_hang_on_rank_1, "rank 1 of 2: did not finish within 0.5 s and was killed"),
        (_fail_on_rank_1, r"rank 1 of 2: Traceback(.|\n)*ValueError: not mine"),
        (lambda: os._exit(3), "rank 0 of 2: the rank died without a word"),
    ],
)
def test_a_world_that_fails_ends_soon(function, said):
    started = time.monotonic()
    limit = 0.5 if function is _hang_on_rank_1 else 30.0
    with pytest.raises(WorldError, match=said):
        run_world(function, 2, time_limit=limit)
    assert time.monotonic() - started < 10


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        Step([])
    with pytest.raises(ValueError, match="loss must be"):
        Step(uneven_rows(), loss="sfl")
    with pytest.raises(ValueError, match="log_probs on every row or on none"):
        Step([Row((1,)), Row((1,), log_probs=(-1.0,))])
    with pytest.raises(ValueError, match="needs --use-tis or --get-mismatch-metrics"):
        Step(uneven_rows(), correction=KEEP_NEAR)
    with pytest.raises(ValueError, match="exclude each other"):
        Split(micro_batch_size=1, max_tokens=9)
    with pytest.raises(ValueError, match="each of 2 data-parallel ranks, got 1"):
        Split(dp=2, rows=[[0]])
    with pytest.raises(ValueError, match="positions 0 to 6 once"):
        Split(dp=2, rows=[[0], [0]]).rows_by_rank(7)
    with pytest.raises(ValueError, match="nothing to check"):
        check_invariance(make_step(), FSDPBackend(), [])
    with pytest.raises(UserError, match="for --train-backend megatron only"):
        FSDPBackend().run(make_step(), Split(cp=2))
