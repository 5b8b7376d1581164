"""How the report cuts rollouts into steps: as training does, complete groups or ragged ones, and what it refuses."""

import pytest

from miles.backends.training_utils.parallel import get_parallel_state
from miles.rollout.debug_data import save_rollout_dump
from miles.tools.aggregation_report.__main__ import main
from miles.tools.aggregation_report.dumps import read_dump
from miles.training_loop import make_shard
from miles.utils.arguments import parse_args
from miles.utils.errors import UserError
from miles.utils.types import Sample
from tests.fast.oracle import MODES
from tests.fast.tools.aggregation_report.test_bad_dumps import error_of
from tests.fast.tools.aggregation_report.test_options import arguments
from tests.fast.tools.aggregation_report.test_report import report_of, report_on, sample


def groups_of(*sizes: int) -> list[Sample]:
    """Groups of so many samples, of 1, 2, 3, ... tokens."""
    members = [(group, place) for group, size in enumerate(sizes) for place in range(size)]
    return [sample(length, place % 2, group=group) for length, (group, place) in enumerate(members, start=1)]


def steps_of_training(samples: list[Sample], mode: str, *options: str) -> list[int] | str:
    """Rows of each step as the training command cuts them, or why it refuses."""
    divisor = ["--loss-aggregation-divisor=9"] if mode == "constant" else []
    try:
        args = parse_args([f"--loss-aggregation={mode}", *divisor, *options])
        return make_shard(args, samples, get_parallel_state().intra_dp, vocab_size=2)["step_row_counts"]
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [[], ["--prompt-groups=complete"], ["--prompt-groups=ragged"]])
@pytest.mark.parametrize(
    ("sizes", "batch_size"), [((3, 3, 3, 3), 4), ((3, 3, 3, 3), 6), ((2, 3, 3, 4), 4), ((2, 3, 3, 4), 12)]
)
def test_steps_and_refusals_are_those_of_training(tmp_path, sizes, batch_size, groups, mode):
    samples = groups_of(*sizes)
    options = ["--n-samples-per-prompt=3", f"--global-batch-size={batch_size}", *groups]
    path = save_rollout_dump(f"{tmp_path}/a.pt", 0, samples)
    dump = read_dump(arguments(str(path), *options), path, skip_bad=False)
    expected = steps_of_training(samples, mode, "--rollout-batch-size=4", *options)
    is_refused = any(refused.name == mode for refused in dump.refusals)
    if isinstance(expected, str):
        assert mode == "prompt_mean" and is_refused
    else:
        assert not is_refused and dump.shard["step_row_counts"] == expected


def test_groups_that_lie_in_two_steps_leave_the_other_modes(tmp_path):
    """Four groups of three, in steps of four: three steps of the twelve samples, as in training."""
    report = report_of(tmp_path, groups_of(3, 3, 3, 3), "--global-batch-size=4")
    assert report["data"]["steps"] == 3 and report["groups"]["groups"] == 4
    assert list(report["modes"]) == ["sample_mean", "token_mean", "constant"]
    assert "prompt group 1 straddle an optimizer-step boundary" in report["unavailable"]["prompt_mean"]
    # In the step of 1 + 2 + 3 + 4 tokens each weighs 1/10, in that of 9 + 10 + 11 + 12 each 1/42.
    assert report["modes"]["token_mean"]["token_weight"] == pytest.approx(
        {"min": 1 / 42, "median": 1 / 42, "max": 0.1}
    )
    ragged = report_of(tmp_path, groups_of(3, 3, 3, 3), "--global-batch-size=4", "--prompt-groups=ragged")
    assert ragged["unavailable"] == {} and ragged["settings"]["prompt_groups"] == "ragged"


def test_what_training_refuses_in_every_mode_is_refused(tmp_path, capsys):
    path = str(save_rollout_dump(f"{tmp_path}/a.pt", 0, groups_of(3, 3)))
    assert error_of(capsys, path, "--global-batch-size=4").startswith(
        f"{path}: the rollout has 6 samples, which is not a multiple of global_batch_size 4; set --global-batch-size"
    )
    assert main([path, "--global-batch-size=4", "--prompt-groups=ragged"]) == 0


def test_the_first_dump_that_refuses_a_mode_is_told(tmp_path):
    whole, ragged = groups_of(2, 2), groups_of(2, 1)
    paths = [
        str(save_rollout_dump(f"{tmp_path}/{{rollout_id}}.pt", number, samples))
        for number, samples in enumerate((whole, groups_of(3, 2, 2), ragged))
    ]
    reason = report_on(tmp_path, *paths)["unavailable"]["prompt_mean"]
    assert reason.startswith(f"{paths[1]}: prompt_mean needs complete prompt groups of n_samples_per_prompt=2 samples")
    assert "1 of 3 groups are not, for example group_index 0 with 3" in reason


def test_the_divisor_is_the_longest_rollout_not_the_longest_row(tmp_path):
    samples = [sample(4, 1), *(sample(3, 0, rollout_id=9) for _ in range(2))]
    assert report_of(tmp_path, samples)["settings"]["constant_divisor"] == 6


def test_an_empty_row_does_not_take_the_advantage_of_its_rollout(tmp_path):
    """Rewards 1 and 0 of one group: advantages of +-0.5 over their standard deviation, sqrt(1/2)."""
    rows = [sample(5, 1, rollout_id=1), sample(0, 1, rollout_id=1), sample(5, 0, rollout_id=2)]
    for samples in (rows, [rows[1], rows[0], rows[2]]):
        gradient_weight = report_of(tmp_path, samples)["modes"]["prompt_mean"]["gradient_weight"]
        assert gradient_weight["magnitude"] == pytest.approx(0.5**0.5, rel=1e-5)
        right = [quarter["right"]["share"] for quarter in gradient_weight["quarters"]]
        assert sum(right) == pytest.approx(0.5)


def test_groups_of_one_reward_after_processing(tmp_path):
    """Rewards 2 and -2 of one group: their squares are the same, which is what the step is made of."""
    samples = [sample(1, 2), sample(2, -2), sample(1, 1, group=1), sample(2, 3, group=1)]
    report = report_of(tmp_path, samples, f"--custom-reward-post-process-path={__name__}.square")
    assert (report["groups"]["one_reward"], report["groups"]["samples_of_one_reward"]) == (1, 2)


def square(args, samples):
    rewards = [float(sample.reward) for sample in samples]
    return rewards, [reward**2 for reward in rewards]


def test_a_hook_of_rewards_needs_no_groups(tmp_path):
    """What a person's own processing returns is the advantage, whatever the samples answer."""
    samples = [sample(1, 2, group=None), sample(2, -3, group=None)]
    report = report_of(tmp_path, samples, f"--custom-reward-post-process-path={__name__}.square")
    assert report["modes"]["sample_mean"]["gradient_weight"]["magnitude"] == pytest.approx((4 + 9) / 2)


@pytest.mark.parametrize("option", ["--n-samples-per-prompt", "--top", "--global-batch-size"])
def test_numbers_larger_than_any_integer_type(tmp_path, option):
    report = report_of(tmp_path, groups_of(2, 2), f"{option}={10**30}", "--prompt-groups=ragged")
    assert report["data"]["samples"] == 4
    if option == "--n-samples-per-prompt":
        assert report["groups"]["incomplete"] == 2
