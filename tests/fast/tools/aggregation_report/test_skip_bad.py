"""What `--skip-bad` leaves out of a dump: the bad samples, whole rollouts of them, and no good one beside."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from miles.tools.aggregation_report.__main__ import main
from miles.utils.errors import UserError
from tests.fast.tools.aggregation_report.test_bad_dumps import error_of, reported, row, write

BAD = row(loss_mask=[1])


def report_on(folder, rows: Sequence[Any], *options: str) -> dict[str, Any]:
    return reported(folder, write(folder / "a.pt", *rows), *options)


def many(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Rows of two groups, of 1, 2, ... tokens."""
    return [row(length, group_index=length % 2, **fields) for length in range(1, count + 1)]


@pytest.mark.parametrize("log_probs", [[-0.5] * 12, [float("nan")] * 12, [-0.5]])
def test_log_probs_of_one_sample_cost_one_sample(tmp_path, log_probs):
    rows = many(12, rollout_log_probs=None)
    rows[11]["rollout_log_probs"] = log_probs
    report = report_on(tmp_path, rows)
    assert report["data"]["samples"] == 11
    (complaint,) = report["skipped"]
    assert complaint.startswith(f"{tmp_path}/a.pt, sample 11 ")


def test_log_probs_that_most_samples_lack(tmp_path):
    rows = many(3, rollout_log_probs=None) + many(2)
    report = report_on(tmp_path, rows)
    assert report["skipped"] == [
        f"{tmp_path}/a.pt, sample {place} (index=None, group_index={group}) has rollout_log_probs, unlike 3 others; "
        "give them on every sample of the rollout, or on none"
        for place, group in ((3, 1), (4, 0))
    ]


@pytest.mark.parametrize("ids", [(None,), (7, 7)])
@pytest.mark.parametrize("others", [[], [BAD]])
def test_metadata_that_becomes_no_column(tmp_path, others, ids):
    """`raw_reward` counts only where every sample has it."""
    odd = [row(5, metadata={"raw_reward": "n/a"}, rollout_id=id_) for id_ in ids]
    report = report_on(tmp_path, [*many(4), *odd, *others])
    assert (report["data"]["samples"], len(report["skipped"])) == (5, len(others))


def test_metadata_that_becomes_a_column_when_another_sample_is_left_out(tmp_path):
    rows = [row(length, metadata={"raw_reward": 1.0}) for length in (1, 2, 3)]
    rows += [row(4, metadata={"raw_reward": "n/a"}), BAD]
    report = report_on(tmp_path, rows)
    assert ["sample 3" in report["skipped"][0], "sample 4" in report["skipped"][1]] == [True, True]
    assert report["data"]["samples"] == 3


def test_a_hook_gets_whole_groups(tmp_path):
    rows = [*(row(length, reward=length) for length in (1, 2, 3, 4)), BAD]
    report = report_on(tmp_path, rows, f"--custom-reward-post-process-path={__name__}.best_of_four")
    assert report["data"]["samples"] == 4 and len(report["skipped"]) == 1
    assert report["data"]["right_samples"] == 1


def best_of_four(args, samples):
    assert len(samples) == 4, "needs a whole group"
    if args.n_samples_per_prompt != 4:
        return [float("nan")] * 4, [float("nan")] * 4
    rewards = [float(sample.reward == max(other.reward for other in samples)) for sample in samples]
    return rewards, rewards


def test_what_a_hook_makes_of_a_sample(tmp_path, capsys):
    option = f"--custom-reward-post-process-path={__name__}.logarithm"
    rows = [row(length, reward=reward) for length, reward in ((1, 0.5), (2, -1), (3, 2), (4, -3))]
    report = report_on(tmp_path, rows, option)
    capsys.readouterr()
    assert report["data"]["samples"] == 2
    assert [text.split(" (")[0] for text in report["skipped"]] == [
        f"{tmp_path}/a.pt, sample {place}" for place in (1, 3)
    ]
    assert "sample 1 (index=None, group_index=0) got from the custom post-processing the reward nan" in error_of(
        capsys, f"{tmp_path}/a.pt", option
    )


def logarithm(args, samples):
    rewards = [sample.reward if sample.reward > 0 else float("nan") for sample in samples]
    return rewards, rewards


@pytest.mark.parametrize("options", [[], ["--skip-bad"]])
def test_a_hook_that_fails_has_nothing_to_do_with_bad_samples(tmp_path, capsys, options):
    path = write(tmp_path / "a.pt", row(), row())
    message = error_of(capsys, path, f"--custom-reward-post-process-path={__name__}.return_too_few", *options)
    assert message == (
        f"{path}: --custom-reward-post-process-path must return (raw_rewards, rewards), one number for each "
        "sample; got 1 and 1 for 2 samples"
    )
    message = error_of(capsys, path, f"--custom-reward-post-process-path={__name__}.fail", *options)
    assert message.startswith(
        f"{path}: --custom-reward-post-process-path {__name__}.fail raised KeyError: 'judge' (test_skip_bad.py:"
    )


def test_a_hook_that_refuses_samples_by_names_of_its_own(tmp_path, capsys):
    path = write(tmp_path / "a.pt", row(), row())
    option = f"--custom-reward-post-process-path={__name__}.refuse"
    message = error_of(capsys, path, option, "--skip-bad")
    assert "refuse raised UserError: sample 77 has no judge (test_skip_bad.py:" in message


def refuse(args, samples):
    raise UserError("sample 77 has no judge")


def return_too_few(args, samples):
    return [1.0], [1.0]


def fail(args, samples):
    return {}["judge"]


def test_a_bad_row_takes_its_whole_rollout(tmp_path, capsys):
    """Rows 1, 2 and 4 are one rollout, of which the second is no sample, and the third has a short mask."""
    parts = [row(2, rollout_id=7), row(2, rollout_id=7, tokens=[]), row(2, rollout_id=7, loss_mask=[1])]
    report = report_on(tmp_path, [row(1), *parts[:2], row(3), parts[2]])
    assert (report["data"]["samples"], report["data"]["rows"]) == (2, 2)
    (complaint,) = report["skipped"]
    assert complaint.startswith(f"{tmp_path}/a.pt, sample 2: 'tokens' must be a list")
    assert complaint.endswith("; left out with all rows of its rollout, [1, 2, 4]")
    assert capsys.readouterr().err.endswith("left out 1 sample\n")


def test_the_size_of_a_group_is_that_of_the_samples_left(tmp_path):
    """Groups of 2 and 2 are left of 3, 3 and 2; advantages are normalized among those that are left."""
    rows = [row(1 + place, group_index=place // 3, reward=place % 3) for place in range(6)]
    rows[0] |= {"tokens": []}
    rows[3] |= {"loss_mask": [1]}
    report = report_on(tmp_path, rows, "--disable-grpo-std-normalization")
    assert report["groups"]["size"] == 2 and report["groups"]["incomplete"] == 0
    # rewards 1 and 2 of each group, 0.5 from their mean: 4 samples of 1/4 each
    assert report["modes"]["prompt_mean"]["weight_of_a_step"] == pytest.approx(1)
    assert report["modes"]["sample_mean"]["gradient_weight"]["magnitude"] == pytest.approx(0.5)


def test_a_sample_without_a_group_among_others(tmp_path, capsys):
    path = write(tmp_path / "a.pt", *many(11), row(12, group_index=None))
    report = reported(tmp_path, path)
    assert report["unavailable"].keys() == {"prompt_mean"}  # of 6 and 5 samples
    assert report["skipped"] == [
        f"{path}, sample 11 (index=None, group_index=None) has no group_index, unlike 11 others; set it to the prompt "
        "that it answers"
    ]
    assert report_without_skipping(tmp_path, path)["unavailable"]["prompts"] == (
        f"{path}: 1 of 12 rows, first sample 11, have no group_index, so nothing says which samples answer the same "
        "prompt; --skip-bad leaves such samples out"
    )


def report_without_skipping(folder, path: str) -> dict[str, Any]:
    assert main([path, f"--json={folder}/whole.json"]) == 0
    return json.loads((folder / "whole.json").read_text())


def test_groups_that_few_samples_have(tmp_path):
    report = report_on(tmp_path, [*(row(length, group_index=None) for length in (1, 2, 3)), row(4)])
    assert report["skipped"] == [] and "prompts" in report["unavailable"]


def test_a_row_without_a_length_is_not_an_empty_one(tmp_path, capsys):
    lengthless = row()
    del lengthless["response_length"]
    path = write(tmp_path / "a.pt", row(), lengthless)
    assert error_of(capsys, path) == (
        f"{path}, sample 1: 'response_length' is missing; give the number of response tokens, the last of 'tokens'; "
        "--skip-bad leaves such samples out"
    )
    assert reported(tmp_path, path)["data"]["samples"] == 1


@pytest.mark.parametrize("rows", [many(4, reward=1.0), [*many(4, reward=1.0), BAD]], ids=["good", "one bad"])
def test_a_hook_that_changes_samples_does_so_once_and_its_words_stay_out_of_the_report(tmp_path, capsys, rows):
    report = report_on(tmp_path, rows, f"--custom-reward-post-process-path={__name__}.half_in_place")
    out, err = capsys.readouterr()
    assert report["data"]["active_tokens"] == 1 + 2 + 3 + 4, "masks are taken before the hook"
    assert "halved to 0.5" in err and "halved to 0.25" not in err and "halved" not in out


def half_in_place(args, samples):
    for sample in samples:
        sample.reward, sample.loss_mask = sample.reward / 2, [0] * sample.response_length
    print(f"halved to {samples[0].reward}")
    rewards = [sample.reward for sample in samples]
    return rewards, rewards
