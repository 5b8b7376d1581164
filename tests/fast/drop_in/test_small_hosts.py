"""The small hosts with the drop-in: the four modes, exactly, and without a flag the numbers of before, bit for bit."""

import functools
import math

import pytest

from miles.drop_in.__main__ import main
from tests.fast.drop_in.small_hosts import HOSTS, copy_host, run_host
from tests.fast.drop_in.table_oracle import Sample, gradient, metrics

MODES = {
    "sample_mean": ["--loss-aggregation", "sample_mean"],
    "prompt_mean": ["--loss-aggregation", "prompt_mean"],
    "token_mean": ["--loss-aggregation", "token_mean"],
    "legacy spelling": ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"],
    "constant": ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "6"],
}
STEP = ["--global-batch-size", "4"]
BACKENDS = {"one": ["megatron", "fsdp"], "two": ["megatron"]}

# Two steps of two prompts with two answers each; masked tokens, a fully masked row, one that is taken out; short rows
# with high rewards and long rows with low ones, so that every mode has another value.
MASKS = [[1, 1], [1, 0, 1, 1, 1], [1], [0, 0, 0], [1, 1, 1, 0, 1, 1], [1], [0, 1, 1], [1, 1]]
REWARDS = [3.0, 0.25, -2.0, 5.0, 0.5, 4.0, -1.0, 2.0]
SAMPLES = [
    {
        "index": i,
        "group_index": i // 2,
        "tokens": [(3 * i + 5 * t + t * t) % 7 for t in range(2 + i % 3 + len(mask))],
        "response_length": len(mask),
        "reward": reward,
        "loss_mask": mask,
        "rollout_log_probs": [-1.5 - 0.11 * ((i + t) % 5) for t in range(len(mask))],
        "remove_sample": i == 7,
    }
    for i, (mask, reward) in enumerate(zip(MASKS, REWARDS, strict=True))
]
# Three prompts with two rollouts each, two of which are two rows.
SEVERAL_ROWS = [
    {**sample, "rollout_id": rollout, "group_index": group}
    for sample, rollout, group in zip(SAMPLES, [0, 0, 1, 2, 3, 4, 4, 5], [0, 0, 0, 1, 1, 2, 2, 2], strict=True)
]

LEGACY_CASES = {
    "default": [],
    "per-token loss": ["--calculate-per-token-loss"],
    "correction": ["--use-tis"],
    "per-token correction": ["--use-tis", "--calculate-per-token-loss"],
    "custom reducer": ["--custom-pg-loss-reducer-function-path", "host_driver.per_hundred"],
    "entropy": ["--entropy-coef", "0.125"],
    "recomputed": ["--recompute-loss-function"],
    "two rows a micro-batch": ["--micro-batch-size", "2"],
    "balanced": ["--balance-data"],
    "supervised": ["--loss-type", "sft_loss"],
    "supervised per token": ["--loss-type", "sft_loss", "--calculate-per-token-loss"],
}


def legacy_cases(host):
    return [
        {"argv": [*STEP, *options], "samples": SAMPLES, "backend": backend}
        for options in LEGACY_CASES.values()
        for backend in BACKENDS[host]
    ]


def mode_cases(host, *options, samples=SAMPLES):
    return [
        {"argv": [*STEP, *options, *mode], "samples": samples, "backend": backend}
        for mode in MODES.values()
        for backend in BACKENDS[host]
    ]


ARGUMENTS = [
    (["--loss-aggregation", "median"], "Unknown --loss-aggregation mode 'median'"),
    (["--loss-aggregation", "constant"], "needs --loss-aggregation-divisor, a positive finite number"),
    (
        ["--loss-aggregation", "token_mean", "--loss-aggregation-divisor", "8"],
        "belongs to --loss-aggregation constant",
    ),
    (
        ["--loss-aggregation", "prompt_mean", "--calculate-per-token-loss"],
        "incompatible with --calculate-per-token-loss",
    ),
    (
        ["--loss-aggregation", "token_mean", "--entropy-coef", "0.5"],
        "auxiliary policy-loss terms are sample-normalized",
    ),
    (
        ["--loss-aggregation", "prompt_mean", "--n-samples-per-prompt", "3"],
        "multiple of n_samples_per_prompt 3; got 4",
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each small host as it is, and with the drop-in."""

    @functools.cache
    def make(host):
        root = tmp_path_factory.mktemp(host)
        plain, changed = copy_host(host, root / "plain"), copy_host(host, root / "changed")
        assert main([str(changed), "--apply"]) == 0
        return plain, changed

    return make


@pytest.fixture(scope="module")
def on_two_ranks(folders):
    """What each changed host gives, by part, with "dp" or "cp" split in two."""

    @functools.cache
    def run(host, axis):
        parts = PARTS[axis](host)
        results = iter(
            run_host(host, folders(host)[1], [case for part in parts.values() for case in part], **{axis: 2})
        )
        return {name: [next(results) for _ in part] for name, part in parts.items()}

    return run


def data_parallel_parts(host):
    return {
        "legacy": legacy_cases(host),
        "modes": mode_cases(host),
        "balanced": mode_cases(host, "--balance-data", "--global-batch-size", "8"),
        "custom": mode_cases(host, "--custom-pg-loss-reducer-function-path", "host_driver.per_hundred"),
    }


def context_parallel_parts(host):
    parts = {
        "modes": [case for case in mode_cases(host) if case["backend"] == "megatron"],
        "parsed": [{"argv": [*STEP, *argv]} for argv in MODES.values()],
        "refused": [{"argv": [*STEP, *argv]} for argv, _ in ARGUMENTS],
    }
    if host == "two":
        parts["rows"] = mode_cases(host, "--global-batch-size", "6", samples=SEVERAL_ROWS)
    return parts


PARTS = {"dp": data_parallel_parts, "cp": context_parallel_parts}


def numbers(values):
    return [numbers(value) for value in values] if isinstance(values, list) else float.fromhex(values)


def check(result, steps, mode, *, ignore=("ess_ratio",)):
    """Compare a result with the oracle's steps; the hosts compute in float32, of which the budget is four ulps."""
    assert "error" not in result, result
    mode, divisor = ("token_mean", None) if mode == "legacy spelling" else (mode, 6 if mode == "constant" else None)
    assert len(result["steps"]) == len(result["gradients"]) == len(steps)
    for logged, table, fields in zip(result["steps"], result["gradients"], steps, strict=True):
        samples = [Sample(sample) for sample in fields]
        expected = metrics(samples, mode, divisor)
        assert set(logged) - set(ignore) == set(expected)
        for key, value in expected.items():
            assert math.isclose(float.fromhex(logged[key]), value, rel_tol=4e-7, abs_tol=4e-7), (key, mode)
        for got, wanted in zip(numbers(table), gradient(samples, mode, divisor), strict=True):
            assert got == pytest.approx(wanted, rel=4e-7, abs=4e-7)


@pytest.mark.parametrize("host", HOSTS)
def test_without_a_flag_every_number_is_the_one_of_before(folders, on_two_ranks, host):
    before = run_host(host, folders(host)[0], legacy_cases(host), dp=2)
    assert on_two_ranks(host, "dp")["legacy"] == before
    assert all("steps" in result for result in before)
    differ = {str(result["gradients"]) for result in before}
    assert len(differ) >= 8, "the cases are to be different computations"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("part", "steps"), [("modes", [SAMPLES[:4], SAMPLES[4:]]), ("balanced", [SAMPLES])])
def test_the_modes_on_two_data_parallel_ranks(on_two_ranks, host, part, steps):
    cases = [mode for mode in MODES for _ in BACKENDS[host]]
    for mode, result in zip(cases, on_two_ranks(host, "dp")[part], strict=True):
        check(result, steps, mode)


@pytest.mark.parametrize("host", HOSTS)
def test_the_modes_on_two_context_parallel_ranks(on_two_ranks, host):
    for mode, result in zip(MODES, on_two_ranks(host, "cp")["modes"], strict=True):
        check(result, [SAMPLES[:4], SAMPLES[4:]], mode)


def test_rollouts_that_are_several_rows_weigh_once(on_two_ranks):
    for mode, result in zip(MODES, on_two_ranks("two", "cp")["rows"], strict=True):
        check(result, [SEVERAL_ROWS], mode)


@pytest.mark.parametrize("host", HOSTS)
def test_the_rollout_log_leaves_the_new_columns_out(on_two_ranks, host):
    parts = on_two_ranks(host, "dp")
    prompt_mean = list(MODES).index("prompt_mean") * len(BACKENDS[host])
    assert parts["modes"][prompt_mean]["rollout"] == parts["legacy"][0]["rollout"]
    assert not any("prompt" in key for key in parts["legacy"][0]["rollout"])


@pytest.mark.parametrize("host", HOSTS)
def test_a_custom_reducer_still_comes_first(on_two_ranks, host):
    """The reducer is 1/100 a token, of which the trainer divides by samples, or by tokens under token_mean."""
    cases = [mode for mode in MODES for _ in BACKENDS[host]]
    for mode, result in zip(cases, on_two_ranks(host, "dp")["custom"], strict=True):
        for logged, fields in zip(result["steps"], (SAMPLES[:4], SAMPLES[4:]), strict=True):
            samples = [Sample(sample) for sample in fields]
            sums = [x * bit for sample in samples for x, bit in zip(sample.policy_loss, sample.mask, strict=True)]
            tokens = sum(sum(sample.mask) for sample in samples)
            divisor = tokens if mode in ("token_mean", "legacy spelling") else len(samples)
            assert math.isclose(float.fromhex(logged["pg_loss"]), sum(sums) / 100 / divisor, rel_tol=4e-7), mode


@pytest.mark.parametrize("host", HOSTS)
def test_the_options_are_parsed(on_two_ranks, host):
    for mode, result in zip(MODES, on_two_ranks(host, "cp")["parsed"], strict=True):
        expected = "token_mean" if mode == "legacy spelling" else mode
        assert result["args"]["loss_aggregation"] == expected
        assert result["args"]["calculate_per_token_loss"] == (expected == "token_mean")


@pytest.mark.parametrize("host", HOSTS)
def test_the_options_are_validated(on_two_ranks, host):
    for (argv, message), result in zip(ARGUMENTS, on_two_ranks(host, "cp")["refused"], strict=True):
        assert message in result["error"], argv


@pytest.mark.parametrize("host", HOSTS)
def test_the_options_are_validated_after_the_yaml_file(folders, tmp_path, host):
    contents = {
        "right": "loss_aggregation: constant\nloss_aggregation_divisor: 16\n",
        "wrong": "loss_aggregation: constant\nloss_aggregation_divisor: -1\n",
        "both": "loss_aggregation: prompt_mean\ncalculate_per_token_loss: true\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    cases = [{"argv": [*STEP, "--custom-config-path", str(tmp_path / name)]} for name in contents]
    right, wrong, both = run_host(host, folders(host)[1], cases)
    assert (right["args"]["loss_aggregation"], right["args"]["loss_aggregation_divisor"]) == ("constant", 16)
    assert "a positive finite number of tokens; got -1" in wrong["error"]
    assert "conflicting values" in both["error"]
