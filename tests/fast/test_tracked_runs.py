"""Runs that TensorBoard and W&B follow: both have what `metrics.jsonl` has, after a kill too."""

import time

import pytest

from miles.trainer import main
from tests.fast.backends.experimental.fsdp_utils.ranks import run_forked, run_ranks, run_ranks_to_outcomes
from tests.fast.tiny_runs import TINY, main_killed_in_rollout, read_metrics


def _scalars_of(records):
    """Return (step, value) of each point of each key, within what float32 loses: 24 bits are 6e-8 of the value."""
    keys = {key for record in records for key in record}
    return {
        key: [(record["train/step"], pytest.approx(record[key], rel=1e-7)) for record in records if key in record]
        for key in keys
    }


def _kill_and_resume(tmp_path, *options):
    """Return the metrics of a run killed in rollout 4, its first step done and the last checkpoint after rollout 3."""
    command = [*TINY, "--output-dir", str(tmp_path / "run"), *options]
    command += ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--save-interval", "2"]
    [(_, error, _)] = run_ranks_to_outcomes(lambda: main_killed_in_rollout(4, command), 1)
    assert isinstance(error, EOFError)
    killed = read_metrics(tmp_path / "run")
    assert [record["train/step"] for record in killed] == list(range(9))
    time.sleep(1 - time.time() % 1)  # both tools name the files of a part by the second
    assert run_ranks(lambda: main(command), 1) == [0]
    resumed = read_metrics(tmp_path / "run")
    assert [record["train/step"] for record in resumed] == list(range(12))
    return killed, resumed


def test_tensorboard_shows_the_metrics_of_a_run_that_was_killed_and_resumed(tmp_path):
    event_files = pytest.importorskip("tests.fast.utils.tracking.event_files")
    killed, resumed = _kill_and_resume(tmp_path, "--tracking", "tensorboard")
    assert killed[8]["perf/step_time"] != resumed[8]["perf/step_time"]
    assert event_files.read_scalars(tmp_path / "run" / "tensorboard") == _scalars_of(resumed)


@pytest.mark.usefixtures("bare_environment")
def test_wandb_has_the_metrics_of_a_run_that_was_killed_and_resumed(tmp_path):
    """The killed process may take steps with it that W&B has not written yet; the resumed part has all of them."""
    wandb_files = pytest.importorskip("tests.fast.utils.tracking.wandb_files")
    _, resumed = _kill_and_resume(tmp_path, "--tracking", "wandb", "--wandb-mode", "offline")
    killed_part, resumed_part = wandb_files.run_files(tmp_path / "run")
    assert killed_part.name == resumed_part.name == f"run-{wandb_files.read_run(resumed_part).run_id}.wandb"
    assert wandb_files.read_history(resumed_part) == [{**record, "_step": record["train/step"]} for record in resumed]
    assert wandb_files.read_config(resumed_part)["num_rollout"] == 6


def test_only_the_first_process_tracks(tmp_path):
    event_files = pytest.importorskip("tests.fast.utils.tracking.event_files")
    command = [*TINY, "--output-dir", str(tmp_path), "--num-rollout", "2", "--tracking", "tensorboard"]
    assert run_ranks(lambda: main(command), 2) == [0, 0]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert event_files.read_scalars(tmp_path / "tensorboard") == _scalars_of(read_metrics(tmp_path))


def test_a_tool_that_does_not_start_stops_every_process_before_the_first_step(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra `tensorboard`)")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file where the folder should be")
    command = [*TINY, "--output-dir", str(tmp_path / "run"), "--tracking", "tensorboard"]
    assert run_ranks(lambda: main(command), 2) == [2, 2]
    assert read_metrics(tmp_path / "run") == []


@pytest.mark.usefixtures("bare_environment")
def test_wandb_without_a_key_is_one_line_and_status_2(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed (extra `wandb`)")
    command = [*TINY, "--output-dir", str(tmp_path / "run"), "--tracking", "wandb"]
    status, _, err = run_forked(lambda: main(command), tmp_path)
    assert status == 2, err
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: --tracking wandb does not start: ") and "--wandb-mode offline" in error
    assert "Traceback" not in err
