"""Metrics for TensorBoard (extra `tensorboard`)."""

from __future__ import annotations

import os
import socket
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.utils.tracking.keys import STEP_KEY

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "tensorboard"
FILE_PREFIX = "events.out.tfevents."
"""By which TensorBoard knows its files."""
FILE_VERSION = "brain.Event:2"


class TensorBoardTracker:
    """Writes each key as a scalar over `train/step`, and the arguments as a text, to an event file.

    The file is written here and not by torch's `SummaryWriter`, whose thread prints a traceback of its own when it
    fails, and later.

    Attributes:
        location: How a person looks at the files.
    """

    def __init__(self, directory: Path, arguments: str, *, earlier: Sequence[Mapping[str, Any]]) -> None:
        """Open a new event file.

        It starts with a mark that makes TensorBoard drop what older files hold from the next step on. Where there are
        no older files, it gets the earlier steps.

        Args:
            directory: The run's folder; event files are in `tensorboard/`.
            arguments: The run's arguments as JSON.
            earlier: The steps before this part of the run, as `metrics.jsonl` has them.

        Raises:
            OSError: it cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary  # here, not at the top: it needs torch

        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        next_step = earlier[-1][STEP_KEY] + 1 if earlier else 0
        is_first = not any(folder.glob(f"{FILE_PREFIX}*"))
        # TensorBoard's other loader leaves the marks of a resume out, and shows points that are gone.
        self.location = f"tensorboard --load_fast=false --logdir {folder}"
        self._file = (folder / _file_name()).open("xb")
        self._records = RecordWriter(self._file)
        self._write_event(0, file_version=FILE_VERSION)
        self._write_event(next_step, session_log=SessionLog(status=SessionLog.START))
        # Four spaces in front are Markdown's block of code.
        self._write_event(next_step, summary=summary.text("arguments", textwrap.indent(arguments, "    ")))
        for record in earlier if is_first else ():
            self._write_step({key: value for key, value in record.items() if value is not None})  # null stood for NaN
        self._file.flush()

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write one step. It is on disk on return: what a killed run left in memory would be missing after a resume.

        Raises:
            OSError: it cannot be written.
        """
        self._write_step(metrics)
        self._file.flush()

    def close(self, *, exit_code: int) -> None:
        """Close the file; event files have no place for `exit_code`."""
        self._file.close()

    def _write_step(self, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._write_event(int(metrics[STEP_KEY]), summary=Summary(value=values))

    def _write_event(self, step: int, **content: Summary | Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())


def _file_name() -> str:
    """Return a name that no other file has, and by which TensorBoard sorts a run's files: the time first."""
    return f"{FILE_PREFIX}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
