"""W&B without a network: its run files, read back. Each run is in a process of its own, as W&B's service has it."""

import math
import time
from argparse import Namespace
from unittest import mock

import pytest

from miles.utils.tracking.wandb_tracker import WandbTracker
from tests.fast.backends.experimental.fsdp_utils.ranks import run_forked, run_ranks
from tests.fast.utils.tracking.wandb_files import (
    read_config,
    read_entries,
    read_exit_code,
    read_history,
    read_run,
    run_files,
)

pytestmark = pytest.mark.usefixtures("bare_environment")


def _args(**options):
    defaults = dict.fromkeys(("project", "team", "group", "mode", "run_id"))
    return Namespace(**{f"wandb_{name}": value for name, value in (defaults | options).items()})


def _track(directory, rows, *, earlier=(), exit_code=0, mode="offline", **options):
    """Write rows as one part of a run does, and return where a person is told to look."""
    args = _args(mode=mode, **options)

    def run():
        tracker = WandbTracker(args, directory, '{"lr": 0.5, "names": ["a", "b"]}', earlier=earlier)
        for row in rows:
            tracker.write(row)
        tracker.close(exit_code=exit_code)
        return tracker.location

    directory.mkdir(exist_ok=True)
    if run_files(directory):
        time.sleep(1 - time.time() % 1)  # W&B names the folder of a part by the second
    return run_ranks(run, 1)[0]


def _rows(steps):
    return [{"train/step": step, "train/loss": step / 3} for step in steps]


def test_every_key_is_in_the_history(tmp_path):
    rows = [
        {"train/step": step, "odd key>/a.b": step / 7, **{f"k/{i}": i * step for i in range(40)}} for step in range(30)
    ]
    location = _track(tmp_path / "run", rows)
    [path] = run_files(tmp_path / "run")
    assert path.stat().st_size > 32768  # more than a block
    assert read_history(path) == [{**row, "_step": row["train/step"]} for row in rows]
    assert location == f"wandb sync {path.parent}"
    assert read_exit_code(path) == 0


def test_values_that_are_not_finite_stay_what_they_are(tmp_path):
    _track(tmp_path / "run", [{"train/step": 0, "a": math.nan, "b": math.inf, "c": -math.inf}])
    [row] = read_history(*run_files(tmp_path / "run"))
    assert [math.nan, math.inf, -math.inf] == pytest.approx([float(row[key]) for key in "abc"], nan_ok=True)


def test_the_run_has_its_names_config_x_axis_and_end(tmp_path):
    _track(tmp_path / "seed-7", _rows(range(1)), exit_code=1, project="lengths", team="us", group="prompt_mean")
    [path] = run_files(tmp_path / "seed-7")
    run, config = read_run(path), read_config(path)
    assert (run.project, run.entity, run.run_group, run.display_name) == ("lengths", "us", "prompt_mean", "seed-7")
    assert (config["lr"], config["names"]) == (0.5, ["a", "b"])
    metrics = [entry.metric for entry in read_entries(path) if entry.HasField("metric")]
    assert {(metric.glob_name, metric.step_metric) for metric in metrics if metric.glob_name} == {("*", "train/step")}
    assert read_exit_code(path) == 1


def test_a_resumed_run_is_the_same_and_whole_and_one_that_starts_over_is_another(tmp_path):
    """The first part is killed after step 4, and step 3 is the first that has to be done again."""
    directory = tmp_path / "run"
    _track(directory, _rows(range(5)))
    _track(directory, _rows(range(3, 6)), earlier=[{**row, "train/none": None} for row in _rows(range(3))])
    _track(directory, _rows(range(2)))
    parts = {}
    for path in run_files(directory):
        parts.setdefault(read_run(path).run_id, []).append(read_history(path))
    steps = [[[row["train/step"] for row in part] for part in run] for run in sorted(parts.values(), key=len)]
    assert steps == [[[0, 1]], [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]]
    whole = max(parts.values(), key=len)[-1]
    assert whole == [{**row, "_step": row["train/step"]} for row in _rows(range(6))]


def test_steps_that_wandb_has_are_left_out(tmp_path, monkeypatch, caplog):
    """Online it tells a resumed run that step 4 is next, the one after the last it has seen of the killed part."""
    run = mock.Mock(starting_step=4, url="https://there", disabled=False, offline=False)
    init = mock.Mock(return_value=run)
    monkeypatch.setattr("wandb.init", init)
    tracker = WandbTracker(_args(), tmp_path, "{}", earlier=_rows(range(2)))
    for row in _rows(range(2, 6)):
        tracker.write(row)
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [4, 5]
    assert caplog.messages == ["W&B has steps of this run up to 3, and takes none of those again"]
    assert init.call_args.kwargs["resume"] == "allow" and tracker.location == "https://there"


def test_the_project_is_the_option_s_the_environment_s_or_the_default(tmp_path, monkeypatch):
    def project(given):
        init = mock.Mock(return_value=mock.Mock(starting_step=0))
        monkeypatch.setattr("wandb.init", init)
        WandbTracker(_args(project=given), tmp_path, "{}", earlier=[])
        return init.call_args.kwargs["project"]

    assert (project(None), project("given")) == ("miles", "given")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    assert (project(None), project("given")) == ("ours", "given")


def test_the_end_of_a_run_waits_for_an_upload_as_long_as_the_manual_says(tmp_path, monkeypatch):
    init = mock.Mock(return_value=mock.Mock(starting_step=0))
    monkeypatch.setattr("wandb.init", init)
    WandbTracker(_args(), tmp_path, "{}", earlier=[])
    assert init.call_args.kwargs["settings"].finish_timeout == 60.0


def test_an_id_that_was_given_is_taken_and_kept(tmp_path):
    directory = tmp_path / "run"
    _track(directory, _rows(range(2)))
    _track(directory, _rows(range(2, 3)), earlier=_rows(range(2)), run_id="mine")
    _track(directory, _rows(range(3, 4)), earlier=_rows(range(3)))
    assert (directory / "wandb" / "run-id.txt").read_text() == "mine\n"
    assert sorted(read_run(path).run_id == "mine" for path in run_files(directory)) == [False, True, True]


def test_disabled_keeps_nothing(tmp_path):
    assert _track(tmp_path / "run", _rows(range(2)), mode="disabled") == "disabled, nothing is kept"
    assert not run_files(tmp_path / "run")


def test_nothing_is_printed_nor_written_elsewhere(tmp_path, bare_environment):
    directory = tmp_path / "run"
    directory.mkdir()

    def run():
        tracker = WandbTracker(_args(mode="offline"), directory, "{}", earlier=[])
        tracker.write({"train/step": 0, "a": 1.0})
        tracker.close(exit_code=0)
        return 0

    assert run_forked(run, tmp_path) == (0, "", "")
    assert list(bare_environment.iterdir()) == []
