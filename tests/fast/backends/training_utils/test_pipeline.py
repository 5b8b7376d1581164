"""The whole walk from samples to metrics by the package's own split and schedule, step by step against the oracle."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fast import oracle
from tests.fast.backends.training_utils import harness
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace
from tests.fast.backends.training_utils.pipeline import run_pipeline, schedules
from tests.fast.backends.training_utils.test_normalization_cases import BY_ID, CASES, flat, rows_of
from tests.fast.backends.training_utils.test_split_properties import PROPERTY, steps

SCHEDULES = {
    "one": {"micro_batch_size": 1},
    "two": {"micro_batch_size": 2},
    "all": {"micro_batch_size": 8},
    "budget": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9},
}


def assert_steps(outcomes, rows, mode, divisor, expected_steps):
    assert [ids for ids, _ in outcomes] == expected_steps
    for ids, outcome in outcomes:
        members = [rows[i] for i in ids]
        expected = float(oracle.value(members, mode, divisor))
        assert outcome.value == pytest.approx(expected, rel=3e-6, abs=3e-6)
        assert outcome.metrics["loss"] == pytest.approx(expected, rel=3e-6, abs=3e-6)
        weights = dict(zip(ids, oracle.weights(members, mode, divisor), strict=True))
        right = [weights.get(i, [0.0] * row.response_length) for i, row in enumerate(rows)]
        assert flat(outcome.gradient) == pytest.approx([float(x) for x in flat(right)], rel=3e-6, abs=1e-7)


@pytest.mark.parametrize("backend", harness.BACKENDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=BY_ID)
def test_cases(case, schedule, backend):
    """Over as many ranks as the case lists, where the split of its mode allows them; else on one."""
    rows, mode = rows_of(case), case["mode"]
    args = mode_namespace(mode, case["divisor"], **batch_sizes(rows), **SCHEDULES[schedule], **harness.LINEAR)
    dp_size = len(case["layout"])
    if mode == "prompt_mean" and args.prompt_groups == "complete" and len(oracle.groups(rows)) % dp_size:
        dp_size = 1
    outcomes = run_pipeline(args, rows, dp_size, backend == "megatron")
    assert_steps(outcomes, rows, mode, case["divisor"], [list(range(len(rows)))])
    assert outcomes[0][1].value == pytest.approx(case["expected"], rel=3e-6, abs=3e-6)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["mode"] != "prompt_mean"], ids=lambda case: case["id"]
)
def test_more_ranks_than_rows(case):
    rows = rows_of(case)
    args = mode_namespace(case["mode"], case["divisor"], **batch_sizes(rows), **harness.LINEAR)
    assert_steps(run_pipeline(args, rows, 5), rows, case["mode"], case["divisor"], [list(range(len(rows)))])


def in_two_steps(rows):
    """The rows and a second step of the same shape: other groups and rollouts, rows turned round, values tripled."""
    second = [
        oracle.Row(
            row.mask[::-1],
            tuple(3 * x + 1 for x in row.values),
            group=row.group + 500,
            rollout=None if row.rollout is None else row.rollout + 500,
            prompt_length=row.prompt_length,
        )
        for row in rows
    ]
    return [*rows, *second]


@pytest.mark.parametrize("mode", oracle.MODES)
@PROPERTY
@given(data=st.data())
def test_any_configuration(mode, data):
    """Two steps of random rows; random ranks, schedule, balancing and backend."""
    first = data.draw(steps(max_parts=data.draw(st.sampled_from([0, 1, 3]))))
    assume(mode != "token_mean" or oracle.num_tokens(first))
    divisor = data.draw(st.sampled_from([1.0, 2.5])) if mode == "constant" else None
    sizes = batch_sizes(first)
    schedule = SCHEDULES[data.draw(st.sampled_from(list(SCHEDULES)))]
    args = mode_namespace(mode, divisor, **sizes, **schedule, **harness.LINEAR, balance_data=data.draw(st.booleans()))
    dp_size = data.draw(st.integers(1, 3))
    if mode == "prompt_mean" and args.prompt_groups == "complete":
        assume(sizes["rollout_batch_size"] % dp_size == 0)
    rows, half = in_two_steps(first), len(first)
    outcomes = run_pipeline(args, rows, dp_size, data.draw(st.booleans()))
    assert_steps(outcomes, rows, mode, divisor, [list(range(half)), list(range(half, 2 * half))])


def test_counts_are_those_of_the_whole_step_on_every_rank_and_micro_batch():
    rows = in_two_steps(rows_of(BY_ID["group-split-local-divisor"]))
    args = mode_namespace("prompt_mean", **{**batch_sizes(rows[:4]), "micro_batch_size": 1}, **harness.LINEAR)
    for _, _, iterator, per_step in schedules(args, rows, 2):
        assert per_step == [2, 2]
        found = [iterator.get_next()["step_counts"] for _ in range(4)]
        assert found == [harness.step_counts(rows[:4])] * 2 + [harness.step_counts(rows[4:])] * 2
