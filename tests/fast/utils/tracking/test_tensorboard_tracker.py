"""TensorBoard's files, read back with TensorBoard's reader."""

import math
import threading

import pytest

from miles.utils.tracking.tensorboard_tracker import TensorBoardTracker
from tests.fast.utils.tracking.event_files import read_scalars, read_texts


def _earlier(steps):
    return [{"train/step": step, "train/loss": step / 4, "train/none": None} for step in range(steps)]


def _track(directory, steps, *, first_step=0, **values):
    """Write some steps as one part of a run does; `values` are functions of the step."""
    tracker = TensorBoardTracker(directory, '{"lr": 0.5}', earlier=_earlier(first_step))
    for step in steps:
        tracker.write({"train/step": step, **{key: value(step) for key, value in values.items()}})
    tracker.close(exit_code=0)
    # Files are read in the order of the seconds in their names, which the parts of a test share.
    for number, path in enumerate(
        sorted((directory / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    ):
        path.rename(path.with_name(f"events.out.tfevents.{number:010d}.host"))


def test_every_key_is_a_scalar_over_the_step(tmp_path):
    _track(tmp_path, range(3), loss=lambda step: step / 3, **{"odd key>/a": lambda step: -step})
    assert read_scalars(tmp_path / "tensorboard") == {
        "train/step": [(0, 0.0), (1, 1.0), (2, 2.0)],
        "loss": [(step, pytest.approx(step / 3, rel=1e-7)) for step in range(3)],
        "odd key>/a": [(0, 0.0), (1, -1.0), (2, -2.0)],
    }


def test_values_that_are_not_finite_stay_what_they_are(tmp_path):
    _track(tmp_path, range(3), loss=[math.nan, math.inf, -math.inf].__getitem__)
    (_, first), second, third = read_scalars(tmp_path / "tensorboard")["loss"]
    assert math.isnan(first) and (second, third) == ((1, math.inf), (2, -math.inf))


def test_the_arguments_are_a_block_of_code(tmp_path):
    TensorBoardTracker(tmp_path, '{\n  "lr": 0.5\n}', earlier=_earlier(4)).close(exit_code=0)
    assert read_texts(tmp_path / "tensorboard") == [(4, '    {\n      "lr": 0.5\n    }')]


def test_each_step_is_on_disk_at_once(tmp_path):
    tracker = TensorBoardTracker(tmp_path, "{}", earlier=[])
    for step in range(3):
        tracker.write({"train/step": step, "loss": 0.5})
        assert len(read_scalars(tmp_path / "tensorboard")["loss"]) == step + 1
    tracker.close(exit_code=0)


def test_a_resumed_run_shows_no_step_twice(tmp_path):
    """Steps 3 and 4 were done after the last checkpoint; the resumed run does 3 again and stops."""
    _track(tmp_path, range(5), loss=lambda step: step, only_before=lambda step: 1.0)
    _track(tmp_path, range(3, 4), first_step=3, loss=lambda step: 10 * step)
    scalars = read_scalars(tmp_path / "tensorboard")
    assert scalars["loss"] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert scalars["only_before"] == [(0, 1), (1, 1), (2, 1)]
    assert [step for step, _ in read_texts(tmp_path / "tensorboard")] == [0, 3]


def test_a_run_that_starts_over_shows_nothing_of_the_one_before(tmp_path):
    _track(tmp_path, range(5), loss=lambda step: step)
    _track(tmp_path, range(2), loss=lambda step: 10 * step)
    assert read_scalars(tmp_path / "tensorboard")["loss"] == [(0, 0), (1, 10)]


def test_the_location_is_the_command_that_shows_it(tmp_path):
    tracker = TensorBoardTracker(tmp_path, "{}", earlier=[])
    tracker.close(exit_code=0)
    assert tracker.location == f"tensorboard --load_fast=false --logdir {tmp_path}/tensorboard"


def test_what_was_not_tracked_before_a_resume_is_filled_in(tmp_path):
    _track(tmp_path, range(3, 5), first_step=3, **{"train/loss": lambda step: step / 4})
    scalars = read_scalars(tmp_path / "tensorboard")
    assert scalars["train/loss"] == [(step, step / 4) for step in range(5)]
    assert scalars["train/step"] == [(step, step) for step in range(5)] and "train/none" not in scalars
    assert [step for step, _ in read_texts(tmp_path / "tensorboard")] == [3]


def test_no_thread_is_started(tmp_path):
    """One that fails prints a traceback, before and beside the one line that a person is told."""
    before = threading.active_count()
    tracker = TensorBoardTracker(tmp_path, "{}", earlier=[])
    tracker.write({"train/step": 0, "loss": 0.5})
    assert threading.active_count() == before
    tracker.close(exit_code=0)
