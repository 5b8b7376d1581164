"""Every number of the JSON file against brute force; and rules of the report, each on hand-computed data."""

import json
from typing import Any

import pytest

from miles.rollout.debug_data import save_rollout_dump
from miles.tools.aggregation_report.__main__ import main
from miles.utils.types import Sample
from tests.fast.oracle import Counting
from tests.fast.tools.aggregation_report.brute_force import expected_report
from tests.fast.tools.aggregation_report.small_dumps import DUMPS, GLOBAL_BATCH_SIZE, with_loss_weights, write_dumps

BY_FLOAT32 = ("gradient_weight", "magnitude")
"""Advantages are float32; what they are a part of is looked at to 6 digits, everything else to 12."""


def report_on(folder, *options: str) -> dict[str, Any]:
    path = folder / "report.json"
    assert main([*options, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}/{place}")
    elif expected is None or isinstance(expected, (str, bool)):
        assert actual == expected, where
    else:
        is_coarse = any(name in where for name in BY_FLOAT32)
        tolerance = pytest.approx(float(expected), rel=2e-6 if is_coarse else 1e-12, abs=1e-7 if is_coarse else 0)
        assert actual == tolerance, where


@pytest.mark.parametrize("normalization", ["weights", "tokens"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_every_number_against_brute_force(tmp_path, is_weighted, normalization):
    dumps = with_loss_weights(DUMPS) if is_weighted else DUMPS
    paths = write_dumps(tmp_path, dumps)
    options = [f"--global-batch-size={GLOBAL_BATCH_SIZE}", f"--loss-weight-normalization={normalization}"]
    options.append("--prompt-groups=ragged")
    report = report_on(tmp_path, *paths, "--divisor=16", "--top=3", *options)
    expected = expected_report(dumps, paths, 16, Counting("drop", normalization), top=3)
    assert_same({key: report[key] for key in expected}, expected)
    assert report["unavailable"] == {} and report["skipped"] == []
    assert [(dump["path"], dump["rows"], dump["steps"]) for dump in report["dumps"]] == [
        (paths[0], 9, 2),
        (paths[1], 3, 1),
    ]
    assert report["settings"]["right"] == "reward 1; wrong: 0"


def sample(length: int, reward: Any, *, group: int | None = 0, **fields: Any) -> Sample:
    """A sample with one prompt token, nothing masked."""
    return Sample(
        **{"group_index": group, "tokens": [1] * (length + 1), "response_length": length, "reward": reward} | fields
    )


def report_of(folder, samples: list[Sample], *options: str) -> dict[str, Any]:
    return report_on(folder, str(save_rollout_dump(f"{folder}/a.pt", 0, samples)), *options)


def test_the_worked_example_of_the_docs(tmp_path):
    """Answers of 2 and 6 tokens to one prompt, of 1 and 1 to another; L is the longest response, 6."""
    report = report_of(tmp_path, [sample(2, 1), sample(6, 0), sample(1, 1, group=1), sample(1, 0, group=1)])
    modes = report["modes"]
    # 1 / (N m_i): 1/8, 1/24, 1/4; over the 10 tokens the fifth and sixth are 1/24
    assert modes["sample_mean"]["token_weight"] == pytest.approx({"min": 1 / 24, "median": 1 / 24, "max": 1 / 4})
    # 1 / (P M_g): 1/16 and 1/4
    assert modes["prompt_mean"]["token_weight"] == pytest.approx({"min": 1 / 16, "median": 1 / 16, "max": 1 / 4})
    assert modes["token_mean"]["token_weight"] == pytest.approx({"min": 0.1, "median": 0.1, "max": 0.1})
    assert modes["constant"]["token_weight"] == pytest.approx({"min": 1 / 24, "median": 1 / 24, "max": 1 / 24})
    assert report["settings"]["constant_divisor"] == 6 and report["settings"]["loss_aggregation_divisor"] is None
    # quarters from the shortest: 1, 1, 2 and 6 tokens
    assert modes["token_mean"]["share_by_quarter"] == pytest.approx([0.1, 0.1, 0.2, 0.6])
    # (1 + 1 + 2 + 6)^2 / (1 + 1 + 4 + 36) = 100 / 42; of prompts (8 + 2)^2 / (64 + 4)
    assert modes["token_mean"]["effective_samples"] == pytest.approx(100 / 42)
    assert modes["token_mean"]["effective_prompts"] == pytest.approx(100 / 68)
    assert modes["sample_mean"]["effective_samples"] == pytest.approx(4)
    # 10 tokens of 1 / 10 or of 1 / (6 x 4)
    assert report["switches"][-1]["from"] == "token_mean" and report["switches"][-1]["all"] == pytest.approx(10 / 24)
    # The wrong answer of 6 tokens has the gradient weight of the right one of 2 under sample_mean, thrice it under
    # token_mean.
    for mode, ratio in (("sample_mean", 1), ("token_mean", 3)):
        quarters = modes[mode]["gradient_weight"]["quarters"]
        assert -quarters[3]["wrong"]["sum"] / quarters[2]["right"]["sum"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("rewards", "options", "num_right", "rule"),
    [
        ([0, 1, 1, 0], [], 2, "reward 1; wrong: 0"),
        ([-1, 1, -1, -1], [], 1, "reward 1; wrong: -1"),
        ([1, 2, 1, 1], [], 1, "reward 2; wrong: 1"),
        ([-1, -2, -2, -1], [], 2, "reward -1; wrong: -2"),
        ([0, 0.25, 1, -3], [], 2, "reward above 0"),
        ([1, 1, 1, 1], [], 4, "reward above 0"),
        ([0, 0, 0, 0], [], 0, "reward above 0"),
        ([0, 0.25, 1, -3], ["--right-above=0.5"], 1, "reward above 0.5"),
        ([0, 1, 1, 0], ["--right-above=1"], 0, "reward above 1"),
    ],
)
def test_which_answers_are_right(tmp_path, rewards, options, num_right, rule):
    samples = [sample(length, reward) for length, reward in zip((1, 2, 3, 4), rewards, strict=True)]
    report = report_of(tmp_path, samples, *options)
    assert (report["data"]["right_samples"], report["data"]["wrong_samples"]) == (num_right, 4 - num_right)
    assert report["settings"]["right"] == rule
    assert sum(report["modes"]["constant"]["share_by_reward"].values()) == pytest.approx(1)


def test_groups_of_other_sizes(tmp_path):
    sizes = {5: 2, 6: 2, 7: 1, 8: 3}
    samples = [sample(3, reward, group=group) for group, size in sizes.items() for reward in range(size)]
    groups = report_of(tmp_path, samples)["groups"]
    assert groups == {
        **{"groups": 4, "size": 2, "incomplete": 1, "larger": 1},
        **{"one_reward": 1, "samples_of_one_reward": 1},
    }
    groups = report_of(tmp_path, samples, "--n-samples-per-prompt=3")["groups"]
    assert (groups["size"], groups["incomplete"], groups["larger"]) == (3, 3, 0)


def test_a_group_of_one_reward_has_no_advantage_though_its_mean_is_rounded(tmp_path):
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1 in floats."""
    samples = [*(sample(2, 0.1) for _ in range(3)), *(sample(2, reward, group=1) for reward in (0, 1, 1))]
    report = report_of(tmp_path, samples)
    assert (report["groups"]["one_reward"], report["groups"]["samples_of_one_reward"]) == (1, 3)


def test_rewards_that_teach_nothing(tmp_path):
    report = report_of(tmp_path, [sample(length, 1) for length in (1, 5, 2, 3)])
    found = report["modes"]["token_mean"]["gradient_weight"]
    assert found["magnitude"] == 0 and found["longest_minus_shortest"] == {"sum": 0, "share": None}
    assert found["quarters"][3]["all"] == {"sum": 0, "share": None, "per_token": None}


def test_samples_without_a_group(tmp_path, capsys):
    samples = [sample(length, length % 2, group=None) for length in (1, 2, 3, 4)]
    report = report_of(tmp_path, samples)
    assert sorted(report["unavailable"]) == ["gradient_weight", "prompt_mean", "prompts"]
    assert report["unavailable"]["prompt_mean"] == (
        f"{tmp_path}/a.pt: prompt_mean needs a group_index on every sample, and sample 0 (index=None, "
        "group_index=None) has none; set Sample.group_index to the prompt that the sample answers"
    )
    assert report["unavailable"]["prompts"] == (
        f"{tmp_path}/a.pt: 4 of 4 rows, first sample 0, have no group_index, so nothing says which samples answer the "
        "same prompt"
    )
    assert report["groups"] is None and "prompt_mean" not in report["modes"]
    mode = report["modes"]["token_mean"]
    assert mode["effective_prompts"] is None and mode["heaviest_prompts"] is None and mode["gradient_weight"] is None
    assert mode["share_by_quarter"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert len(report["switches"]) == 3
    assert "not available" in capsys.readouterr().out


def test_groups_by_place_have_advantages(tmp_path):
    """Rewards 1 0 | 0 1 in twos: the longest, right, is made more likely by as much as the third is made less."""
    samples = [sample(length, reward, group=None) for length, reward in ((1, 1), (2, 0), (3, 0), (4, 1))]
    report = report_of(tmp_path, samples, "--n-samples-per-prompt=2")
    assert sorted(report["unavailable"]) == ["prompt_mean", "prompts"]
    quarters = report["modes"]["sample_mean"]["gradient_weight"]["quarters"]
    assert [quarter["all"]["share"] for quarter in quarters] == pytest.approx([0.25, -0.25, -0.25, 0.25])


def test_one_dump_without_groups_leaves_the_numbers_of_prompts_out(tmp_path):
    paths = [
        str(
            save_rollout_dump(
                f"{tmp_path}/{{rollout_id}}.pt", number, [sample(1, 0, group=group), sample(3, 1, group=4)]
            )
        )
        for number, group in enumerate((4, None, None))
    ]
    report = report_on(tmp_path, *paths)
    assert sorted(report["unavailable"]) == ["gradient_weight", "prompt_mean", "prompts"]
    assert report["unavailable"]["prompt_mean"].startswith(f"{paths[1]}: prompt_mean needs")
    assert report["data"]["samples"] == 6


def test_raw_rewards_need_no_groups(tmp_path):
    samples = [sample(length, reward, group=None) for length, reward in ((1, 1), (2, -3))]
    report = report_of(tmp_path, samples, "--disable-rewards-normalization")
    assert report["modes"]["sample_mean"]["gradient_weight"]["magnitude"] == pytest.approx(0.5 * 1 + 0.5 * 3)


def test_whitened_advantages(tmp_path):
    """Advantages +-0.5 on 2 and 4 tokens: mean -1/6, variance (2 (2/3)^2 + 4 (1/3)^2) / 5 = 4/15."""
    options = ["--normalize-advantages", "--disable-grpo-std-normalization"]
    found = report_of(tmp_path, [sample(2, 1), sample(4, 0)], *options)["modes"]["sample_mean"]["gradient_weight"]
    deviation = (4 / 15) ** 0.5
    # of two samples the shorter is in the second quarter: quarter = 3 - floor(4 (1 - 0) / 2)
    assert found["quarters"][1]["right"]["sum"] == pytest.approx(0.5 * (2 / 3) / deviation, rel=1e-5)
    assert found["quarters"][3]["wrong"]["sum"] == pytest.approx(-0.5 * (1 / 3) / deviation, rel=1e-5)


def test_a_step_of_which_nothing_is_left_has_no_token_mean(tmp_path):
    masked = [sample(2, reward, group=1, loss_mask=[0, 0]) for reward in (0, 1)]
    report = report_of(tmp_path, [sample(3, 0), sample(1, 1), *masked], "--global-batch-size=2")
    assert "token_mean needs at least one active token in every optimizer step" in report["unavailable"]["token_mean"]
    assert list(report["modes"]) == ["sample_mean", "prompt_mean", "constant"]
    assert report["modes"]["constant"]["token_weight_over_token_mean"] is None
    assert report["data"]["fully_masked_samples"] == 2


def test_nothing_but_masked_samples(tmp_path):
    report = report_of(tmp_path, [sample(2, 1, remove_sample=True), sample(0, 0)])
    mode = report["modes"]["sample_mean"]
    assert mode["token_weight"] == {"min": None, "median": None, "max": None}
    assert mode["share_by_quarter"] == [None] * 4 and mode["effective_samples"] == 0
    assert report["quarters"][3]["share_of_tokens"] is None and report["switches"][0]["all"] is None


def test_a_custom_normalization_of_rewards(tmp_path):
    path = f"{__name__}.square_rewards"
    samples = [sample(1, reward) for reward in (2, -3)] + [sample(1, 1, rollout_id=8), sample(2, 1, rollout_id=8)]
    report = report_of(tmp_path, samples, f"--custom-reward-post-process-path={path}")
    assert report["modes"]["sample_mean"]["gradient_weight"]["magnitude"] == pytest.approx((4 + 9 + 1) / 3)
    assert report["groups"]["one_reward"] == 0


def square_rewards(args, samples):
    assert args.n_samples_per_prompt == 3  # the most frequent size of a group
    rewards = [float(sample.reward) for sample in samples]
    return rewards, [reward**2 for reward in rewards]


@pytest.mark.parametrize("reward", [0.1, 0.7])
def test_equal_rewards_push_nothing_whatever_their_mean_is_rounded_to(tmp_path, reward):
    """3 x 0.1 / 3 is not 0.1 in float64."""
    samples = [sample(length, reward, group=length // 3) for length in range(3, 12)]
    report = report_on(tmp_path, str(save_rollout_dump(f"{tmp_path}/a.pt", 0, samples)))
    assert report["groups"]["one_reward"] == 3
    assert [mode["gradient_weight"]["magnitude"] for mode in report["modes"].values()] == [0.0] * 4


def test_no_difference_to_a_quarter_that_is_empty(tmp_path):
    samples = [sample(length, length % 2, group=0) for length in (1, 2, 3)]
    report = report_on(tmp_path, str(save_rollout_dump(f"{tmp_path}/a.pt", 0, samples)))
    assert report["quarters"][0]["samples"] == 0
    for mode in report["modes"].values():
        assert mode["gradient_weight"]["longest_minus_shortest"] == {"sum": None, "share": None}
