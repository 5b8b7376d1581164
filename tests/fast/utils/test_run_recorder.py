"""What a person sees of a run."""

import contextlib
import json
import time
from argparse import Namespace
from unittest import mock

import pytest

from miles.utils import run_recorder
from miles.utils.run_recorder import RunRecorder, SilentRecorder
from miles.utils.tracking import Trackers


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch):
    monkeypatch.setattr(
        run_recorder.tqdm, "monitor_interval", 0
    )  # it would be a thread of the process that tests fork


def _recorder(tmp_path, *, first_rollout_id=0):
    args = Namespace(num_rollout=4, num_steps_per_rollout=2, tracking=["jsonl"])
    return RunRecorder(args, tmp_path, first_rollout_id=first_rollout_id, started=time.monotonic())


def test_lines_carry_the_rollout_and_the_times(tmp_path, capsys, monkeypatch):
    clock = iter([10.0, 13.0, 18.0, 25.0])  # rollout starts; training starts; step 0; step 1
    with _recorder(tmp_path) as recorder:
        monkeypatch.setattr(run_recorder.time, "monotonic", lambda: next(clock, 30.0))
        recorder.start_rollout()
        recorder.start_training()
        for step in range(2):
            recorder.record(0, {"train/step": step, "train/loss": 0.5, "rollout/raw_reward": 0.25})
        recorder.end_rollout(0, tmp_path / "iter_0000001")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["train/step"] for record in records] == [0, 1]
    assert [(record["rollout/step"], record["perf/rollout_time"], record["perf/step_time"]) for record in records] == [
        (0, 3.0, 5.0),
        (0, 3.0, 7.0),
    ]
    summary = capsys.readouterr().out
    assert summary.startswith("stopped: 1 of 4 rollouts, 2 optimizer steps")
    assert "reward: 0.250 over the first 2 steps" in summary
    assert f"checkpoint: {tmp_path}/iter_0000001" in summary


def test_the_log_has_one_short_line_a_step(tmp_path, caplog):
    caplog.set_level("INFO", logger="miles")
    with _recorder(tmp_path) as recorder:
        metrics = {"train/loss": 1 / 3, "train/step": 7, "rollout/raw_reward": 0.25, "rollout/log_probs": -1.0}
        recorder.record(3, metrics)
    assert [record.message for record in caplog.records] == ["step 7: raw_reward=0.25 loss=0.3333"]


SKIPPED = {"train/skipped_steps": 2, "train/step": 7, "rollout/raw_reward": 0.25, "rollout/log_probs": -1.0}


def test_a_skipped_step_says_so(tmp_path, caplog, capsys):
    """It has neither loss nor gradient norm, and is no optimizer step."""
    caplog.set_level("INFO", logger="miles")
    with _recorder(tmp_path) as recorder:
        recorder.record(3, {"train/loss": 0.5, "train/step": 6, "train/num_tokens": 9, "rollout/raw_reward": 0.5})
        recorder.record(3, SKIPPED)
    assert [record.message for record in caplog.records] == [
        "step 6: raw_reward=0.5 loss=0.5 num_tokens=9",
        "step 7: skipped, nothing was left to train on; raw_reward=0.25 skipped_steps=2",
    ]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert line["train/skipped_steps"] == 2 and "train/loss" not in line
    summary = capsys.readouterr().out
    assert "1 optimizer steps (1 more skipped), 9 response tokens trained on" in summary


def test_a_run_that_fails_before_its_first_step_leaves_the_word_to_the_error(tmp_path, capsys):
    with pytest.raises(KeyError), _recorder(tmp_path):
        raise KeyError
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error, exit_code", [(None, 0), (KeyboardInterrupt, 1)])
def test_trackers_are_told_what_the_file_holds_and_how_the_run_ended(tmp_path, capsys, monkeypatch, error, exit_code):
    tracker = mock.Mock(location="https://there")
    monkeypatch.setattr(run_recorder, "open_trackers", lambda args, metrics: Trackers({"wandb": tracker}))
    with contextlib.suppress(KeyboardInterrupt), _recorder(tmp_path) as recorder:
        for step in range(2):
            recorder.record(0, {"train/step": step, "train/loss": step / 3})
        if error is not None:
            raise error
    told = [call.args[0] for call in tracker.write.call_args_list]
    assert told == [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tracker.close.assert_called_once_with(exit_code=exit_code)
    assert "\nwandb: https://there\n" in capsys.readouterr().out


def test_the_bar_counts_steps_and_shows_what_is_being_done(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(run_recorder, "REFRESH_SECONDS", 0.0)
    with _recorder(tmp_path, first_rollout_id=2) as recorder:
        recorder.report("log-probs 1/3")
        recorder.record(2, {"train/step": 4, "train/loss": 0.125, "rollout/raw_reward": 0.5})
    shown = capsys.readouterr().err
    assert "log-probs 1/3" in shown
    assert "4/8" in shown and "5/8" in shown
    assert "loss=0.125, reward=0.500" in shown


def test_the_bar_ends_full_however_many_steps_the_rollouts_had(tmp_path, capsys, monkeypatch):
    """Four rollouts of two expected steps: eight; those of 1, 3, 2 and 4 steps make ten."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with _recorder(tmp_path) as recorder:
        progress, step = [], 0
        for rollout_id, num_steps in enumerate([1, 3, 2, 4]):
            for _ in range(num_steps):
                recorder.record(rollout_id, {"train/step": step, "train/loss": 0.5})
                step += 1
                assert recorder._bar.n <= recorder._bar.total
            recorder.end_rollout(rollout_id, None)
            progress.append((recorder._bar.n, recorder._bar.total))
    assert progress == [(1, 7), (4, 8), (6, 8), (10, 10)]


def test_the_silent_recorder_answers_to_the_same_calls(tmp_path, capsys):
    with SilentRecorder() as recorder:
        recorder.start_rollout()
        recorder.start_training()
        recorder.report("anything")
        recorder.record(0, {"train/loss": 1.0})
        recorder.end_rollout(0, None)
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
