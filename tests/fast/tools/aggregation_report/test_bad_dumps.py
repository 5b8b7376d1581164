"""Dumps that cannot be used: one line that says what was wrong, or a report without the bad samples."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.tools.aggregation_report.__main__ import main

BAD_SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "no_tokens": ({"tokens": []}, r"sample 1: 'tokens' must be a list of at least one token id, got \[\]"),
    "tokens_in_a_tensor": (
        {"tokens": torch.arange(5000)},
        r"sample 1: 'tokens' must be a list .*, got tensor\(\[.{,80}\.\.\.",
    ),
    "unknown_status": ({"status": "done"}, "sample 1: unknown status 'done'; expected one of .*'completed'"),
    "fractional_token": ({"tokens": [1, 2.5, 3, 4]}, r"sample 1 .*tokens\[1\] = 2.5; it must be a list of integers"),
    "short_mask": ({"loss_mask": [1]}, "sample 1 .*loss_mask of length 1 for a response_length of 3"),
    "mask_of_2": ({"loss_mask": [1, 2, 0]}, r"sample 1 .*loss_mask\[1\] = 2; a mask holds 0 \(masked\) and 1"),
    "too_long": ({"response_length": 9}, "sample 1 .*4 tokens for a response_length of 9"),
    "no_prompt": ({"tokens": [1, 1, 1]}, "sample 1 has 3 tokens .*at least one prompt token has to come before"),
    "nan_reward": ({"reward": float("nan")}, "sample 1 .*has reward nan; it must be a finite number"),
    "no_reward": ({"reward": None}, "sample 1 .*has reward None; it must be a finite number"),
    "two_rewards": ({"reward": {"acc": 1.0}}, "sample 1 .*choose one of several named rewards with --reward-key"),
    "text_group": ({"group_index": "a"}, r"sample 1 .*has group_index 'a' \(str\); it must be an integer or None"),
    "tensor_group": ({"group_index": torch.ones(2, 2)}, r"sample 1 .*has group_index tensor.* \(Tensor\); it must be"),
    "removed_tokens": (
        {"remove_sample": np.array([True, False, True])},
        "sample 1 .*remove_sample array.*True or False",
    ),
    "negative_weight": ({"loss_weights": [1, -1, 1]}, r"sample 1 .*loss_weights\[1\] = -1.0; a weight must be 0"),
    "nan_log_prob": ({"rollout_log_probs": [0.0, float("nan"), 0.0]}, "sample 1 .*log-probs must be finite"),
    "no_log_probs": ({"rollout_log_probs": None}, "sample .*has no rollout_log_probs, unlike "),
}


def row(length: int = 3, **fields: Any) -> dict[str, Any]:
    good = {
        **{"group_index": 0, "tokens": [1] * (length + 1), "response_length": length, "reward": length % 2},
        **{"loss_mask": [1] * length, "status": "completed", "rollout_log_probs": [-0.5] * length},
    }
    return good | fields


def write(path: Path, *rows: Any, **others: Any) -> str:
    torch.save({"rollout_id": 0, "samples": list(rows), **others}, path)
    return str(path)


def error_of(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the command on something bad and return its one line, without the word that all of them begin with."""
    assert main(list(options)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


def test_a_missing_file(tmp_path, capsys):
    message = error_of(capsys, f"{tmp_path}/a.pt")
    assert message == f"cannot read rollout data {tmp_path}/a.pt: No such file or directory"


def test_a_folder(tmp_path, capsys):
    assert error_of(capsys, str(tmp_path)) == f"cannot read rollout data {tmp_path}: Is a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_an_unreadable_file(tmp_path, capsys):
    path = Path(write(tmp_path / "a.pt", row()))
    path.chmod(0)
    assert error_of(capsys, str(path)) == f"cannot read rollout data {path}: Permission denied"


def test_a_truncated_file(tmp_path, capsys):
    path = Path(write(tmp_path / "a.pt", row()))
    path.write_bytes(path.read_bytes()[:-100])
    assert error_of(capsys, str(path)) == f"{path} is truncated: its end is missing; copy or write it again"


def test_no_torch_file(tmp_path, capsys):
    path = tmp_path / "a.pt"
    path.write_text('{"samples": []}')
    assert "is damaged, or not a file that torch.save wrote" in error_of(capsys, str(path))


class Code:
    """Pickles as a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code-was-run",)


def test_pickled_code(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("a.pt"), row(metadata={"x": Code()}))
    assert "refused for safety: it carries pickled code, posix.mkdir" in error_of(capsys, "a.pt")
    Path("b.pt").write_bytes(pickle.dumps({"samples": [row()]}))
    assert "refused for safety: it is a bare Python pickle" in error_of(capsys, "b.pt", "--skip-bad")
    assert not Path("code-was-run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": []}, r"is no rollout dump: expected a mapping with the key 'samples', got .*\['rows'\]"),
        ({"samples": []}, "holds an empty rollout; expected at least one sample"),
        ({"samples": {"a": row()}}, "'samples' must be a list, got dict"),
        ([row()], "is no rollout dump: .*got list"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--skip-bad"]])
def test_other_content(tmp_path, capsys, content, message, options):
    torch.save(content, tmp_path / "a.pt")
    assert_matches(message, error_of(capsys, f"{tmp_path}/a.pt", *options))


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_stops_the_report(tmp_path, capsys, name):
    fields, pattern = BAD_SAMPLES[name]
    message = error_of(capsys, write(tmp_path / "a.pt", row(), row(**fields), row(5)))
    assert_matches(f"^{tmp_path}/a.pt, {pattern}", message)
    assert message.endswith("; --skip-bad leaves such samples out")


def reported(tmp_path: Path, *options: str) -> dict[str, Any]:
    assert main([*options, "--skip-bad", f"--json={tmp_path}/report.json"]) == 0
    return json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_skip_bad_leaves_the_sample_out(tmp_path, capsys, name):
    fields, pattern = BAD_SAMPLES[name]
    without = reported(tmp_path, write(tmp_path / "b.pt", row(), row(5)))
    capsys.readouterr()
    report = reported(tmp_path, write(tmp_path / "a.pt", row(), row(**fields), row(5)))
    (complaint,) = report["skipped"]
    assert_matches(f"^{tmp_path}/a.pt, {pattern}", complaint)
    assert report["modes"]["sample_mean"]["share_by_quarter"] == without["modes"]["sample_mean"]["share_by_quarter"]
    assert report["data"] == without["data"]
    assert capsys.readouterr().err == f"left out: {complaint}\nleft out 1 sample\n"


def test_skip_bad_leaves_out_whole_rollouts_that_disagree(tmp_path):
    """Rows 0 and 3 are one rollout with two rewards; rows 1 and 4 one that answers two prompts."""
    rows = [
        *(row(rollout_id=5, reward=0), row(2, rollout_id=6, reward=1), row(4)),
        *(row(rollout_id=5, reward=1), row(2, rollout_id=6, reward=1, group_index=1), row(rollout_id=7)),
    ]
    report = reported(tmp_path, write(tmp_path / "a.pt", *rows))
    first, second = report["skipped"]
    assert f"{tmp_path}/a.pt, samples [0, 3] are rows of one rollout, rollout_id 5, and must share one reward" in first
    assert "rollout_id 6 spans several prompt groups" in second
    assert second.endswith("; left out with all rows of its rollout, [1, 4]")
    assert report["data"]["samples"] == 2


def test_all_bad_samples_are_in_the_json_and_ten_on_the_terminal(tmp_path, capsys):
    bad = [row(reward=None), row(tokens=[]), row(loss_mask=[1]), "text"] * 4
    report = reported(tmp_path, write(tmp_path / "a.pt", *bad, row()))
    assert len(report["skipped"]) == 16
    for place, complaint in enumerate(report["skipped"]):
        assert f"a.pt, sample {place}" in complaint
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"left out: {text}" for text in report["skipped"][:10]] + [
        "left out 16 samples, 6 more than shown"
    ]


def test_nothing_is_left(tmp_path, capsys):
    path = write(tmp_path / "a.pt", row(reward=None))
    assert main([path, "--skip-bad", f"--json={tmp_path}/b.json"]) == 2
    *told, error = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["dumps"] == [{"path": path, "rows": 0, "steps": 0, "skipped": 1}]
    assert told[0] == f"left out: {report['skipped'][0]}"
    assert error.startswith("error: no sample is left: all 1 of the dumps cannot be trained on")


def test_a_dump_of_which_nothing_is_left_is_left_out(tmp_path):
    paths = [write(tmp_path / "a.pt", row(reward=None)), write(tmp_path / "b.pt", row(), row(2))]
    report = reported(tmp_path, *paths)
    assert [(dump["path"], dump["rows"], dump["steps"], dump["skipped"]) for dump in report["dumps"]] == [
        (paths[0], 0, 0, 1),
        (paths[1], 2, 1, 0),
    ]
    assert (report["data"]["samples"], len(report["skipped"])) == (2, 1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["{step}.pt"], r"the one placeholder allowed is {rollout_id} \(write a brace itself twice\)"),
        (["{rollout_id"], "the one placeholder allowed is {rollout_id}"),
        (["none_{rollout_id}.pt"], "no file fits the template none_{rollout_id}.pt; expected files such as none_0.pt"),
        (["a_1.pt", "a_1.pt"], "a_1.pt is named twice; each dump counts once, so leave one of the two out"),
        (["a_1.pt", "a_{rollout_id}.pt"], "a_1.pt is named twice"),
        (["a_1.pt", "./x/../a_1.pt"], "a_1.pt is named twice"),
    ],
)
def test_names_of_dumps(tmp_path, capsys, monkeypatch, names, message):
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    write(Path("a_1.pt"), row())
    assert_matches(message, error_of(capsys, *names))


def test_a_bad_option_is_found_before_a_bad_file(tmp_path, capsys):
    assert "needs --loss-aggregation-divisor, a positive" in error_of(capsys, f"{tmp_path}/no.pt", "--divisor=-1")
