"""What trackers do together: all get each step, and one that fails harms neither the run nor the others."""

import json
import logging
import os
import resource
import signal
from argparse import Namespace
from pathlib import Path

import pytest

from miles.utils.errors import UserError
from miles.utils.tracking import MetricsLog, Trackers, open_trackers
from tests.fast.backends.experimental.fsdp_utils.ranks import run_forked, run_ranks

ROWS = [{"train/step": step, "rollout/step": step, "train/loss": step / 3} for step in range(6)]


class Recording:
    """A tracker that keeps what it is told, and raises in the step `failing`."""

    def __init__(self, failing=None, location="there"):
        self.failing, self.location, self.steps, self.exit_code = failing, location, [], None

    def write(self, metrics):
        self.steps.append(metrics["train/step"])
        if metrics["train/step"] == self.failing:
            raise OSError("No space left\non device.")

    def close(self, *, exit_code):
        self.exit_code = exit_code


def test_all_get_every_step_and_the_exit_code():
    one, other = Recording(), Recording(location="elsewhere")
    trackers = Trackers({"one": one, "other": other})
    for row in ROWS:
        trackers.write(row)
    assert list(trackers.locations()) == ["one: there", "other: elsewhere"]
    trackers.close(exit_code=1)
    for tracker in (one, other):
        assert (tracker.steps, tracker.exit_code) == ([0, 1, 2, 3, 4, 5], 1)


def test_one_that_fails_is_left_out_with_one_warning(caplog):
    bad, good = Recording(failing=2), Recording()
    trackers = Trackers({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING, logger="miles"):
        for row in ROWS:
            trackers.write(row)
        trackers.close(exit_code=0)
    assert (bad.steps, good.steps) == ([0, 1, 2], [0, 1, 2, 3, 4, 5])
    assert [record.getMessage() for record in caplog.records] == [
        "--tracking bad failed; training goes on without it, and metrics.jsonl has every step: "
        "OSError: No space left on device"
    ]
    assert list(trackers.locations()) == ["good: there"]


def test_a_failure_in_closing_is_a_warning_too(caplog, monkeypatch):
    tracker = Recording()
    monkeypatch.setattr(tracker, "close", lambda *, exit_code: 1 / 0)
    Trackers({"one": tracker}).close(exit_code=0)
    assert "--tracking one failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_ctrl_c_in_a_tracker_stops_the_run(monkeypatch):
    tracker = Recording()

    def interrupted(metrics):
        raise KeyboardInterrupt

    monkeypatch.setattr(tracker, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Trackers({"one": tracker}).write(ROWS[0])


def _metrics(tmp_path):
    return MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)


def test_jsonl_alone_opens_nothing_else(tmp_path):
    assert list(open_trackers(Namespace(tracking=["jsonl"]), _metrics(tmp_path)).locations()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_tool_that_does_not_start_is_for_the_user_to_fix(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra `tensorboard`)")
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"^--tracking tensorboard does not start: .*fix that, or leave it out$"):
        open_trackers(Namespace(tracking=["jsonl", "tensorboard"]), _metrics(tmp_path))


def test_a_tool_that_does_not_start_prints_nothing_of_its_own(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra `tensorboard`)")
    (tmp_path / "tensorboard").write_text("a file where the folder should be")

    def run():
        with pytest.raises(UserError):
            open_trackers(Namespace(tracking=["jsonl", "tensorboard"]), _metrics(tmp_path))
        return 0

    assert run_forked(run, tmp_path) == (0, "", "")


def test_tensorboard_without_earlier_files_is_filled_in(tmp_path):
    """As is W&B: both get from `metrics.jsonl` what came before `--tracking` named them."""
    event_files = pytest.importorskip("tests.fast.utils.tracking.event_files")
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=4)
    trackers = open_trackers(Namespace(tracking=["jsonl", "tensorboard"]), metrics)
    trackers.write(ROWS[4])
    trackers.close(exit_code=0)
    assert [step for step, _ in event_files.read_scalars(tmp_path / "tensorboard")["train/loss"]] == [0, 1, 2, 3, 4]


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path):
    """A limit on the size of files stands in for it: metrics.jsonl stays below, the event file does not."""
    event_files = pytest.importorskip("tests.fast.utils.tracking.event_files")
    args = Namespace(tracking=["jsonl", "tensorboard"], padding="x" * 2000)
    rows = [row | {f"metric/{i}": 0.5 for i in range(20)} for row in ROWS]

    def run():
        metrics = _metrics(tmp_path)
        trackers = open_trackers(args, metrics)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        for row in rows:
            metrics.write(row)
            trackers.write(row)
        trackers.close(exit_code=0)
        metrics.close()
        return len(list(trackers.locations()))

    assert run_forked(run, tmp_path) == (0, "", "")  # the warning is all; the test's own handlers have it
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows
    assert 0 < len(event_files.read_scalars(tmp_path / "tensorboard")["train/loss"]) < len(rows)


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds W&B's service through /proc")
def test_the_death_of_wandb_s_service_does_not_end_the_run(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed (extra `wandb`)")
    names = {f"wandb_{name}": None for name in ("team", "group", "run_id")}
    args = Namespace(tracking=["jsonl", "wandb"], wandb_project="miles", wandb_mode="offline", **names)

    def run():
        trackers = open_trackers(args, _metrics(tmp_path))
        trackers.write(ROWS[0])
        before = list(trackers.locations())
        for child in _children():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for row in ROWS[1:]:
            trackers.write(row)
        trackers.close(exit_code=0)
        return before, list(trackers.locations())

    [(before, after)] = run_ranks(run, 1)
    assert len(before) == 1 and after == []


def _children():
    """Return the ids of this process's children: in a process that has just begun, W&B's service."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
