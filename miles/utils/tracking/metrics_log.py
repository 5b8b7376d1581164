"""`metrics.jsonl`, the record of a run that is always kept; every other tracker follows it."""

import contextlib
import itertools
import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.utils.errors import RankError, UserError
from miles.utils.tracking.keys import ROLLOUT_KEY, STEP_KEY

logger = logging.getLogger(__name__)


class MetricsLog:
    """The metrics of a run: one JSON object a line and an optimizer step, each on disk before the next step starts.

    Attributes:
        records: Every line so far, those that an earlier part of the run wrote included.
    """

    def __init__(self, path: Path, *, first_rollout_id: int) -> None:
        """Open `path` and drop what stands there from rollout `first_rollout_id` on, which is about to be trained.

        A line that a killed run left unfinished is dropped too. The file as it was stays beside it, under a number.

        Raises:
            UserError: the file cannot be written.
        """
        self.path = path
        try:
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            records = [record for line in lines if (record := parse_record(line)) is not None]
            self.records = [record for record in records if record[ROLLOUT_KEY] < first_rollout_id]
            dropped = len(lines) - len(self.records)
            if dropped:
                kept = _free_name(path)
                path.replace(kept)
                logger.warning(
                    "%s: dropped %d lines from rollout %d on; the file as it was is %s",
                    path,
                    dropped,
                    first_rollout_id,
                    kept,
                )
            partial = path.with_name(f"{path.name}.tmp")
            partial.write_text("".join(f"{json.dumps(record)}\n" for record in self.records))
            partial.replace(path)
            self._file = path.open("a")
        except OSError as error:
            raise UserError(_cannot_write(path, error)) from error

    @property
    def next_step(self) -> int:
        """The number of the optimizer step after the last one kept; 0 where none is."""
        return self.records[-1][STEP_KEY] + 1 if self.records else 0

    def write(self, metrics: Mapping[str, float]) -> None:
        """Append one step. JSON has no NaN and no infinity; such a value becomes null.

        Raises:
            RankError: it cannot be written, the disk being full, say.
        """
        record = {key: _as_json_number(value) for key, value in metrics.items()}
        try:
            self._file.write(f"{json.dumps(record)}\n")
            self._file.flush()
        except OSError as error:
            raise RankError(_cannot_write(self.path, error)) from error
        self.records.append(record)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # of what `write` could not write, and has told
            self._file.close()


def _cannot_write(path: Path, error: OSError) -> str:
    return f"cannot write metrics to {path} (--output-dir): {error.strerror}; make room, or name another folder"


def _free_name(path: Path) -> Path:
    """Return `path` with the first number before its suffix that no file has yet: metrics.1.jsonl, ..."""
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return next(candidate for candidate in numbered if not candidate.exists())


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the metrics that a line of `metrics.jsonl` holds: numbers by name, null where one was not finite.

    Returns:
        None where the line is something else.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(map(_is_metric, record.values())):
        return None
    return record if all(_is_count(record.get(key)) for key in (ROLLOUT_KEY, STEP_KEY)) else None


def _is_metric(value: Any) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_count(value: Any) -> bool:
    """Whether a value counts steps or rollouts: an integer that a float64 holds exactly, as every reader needs."""
    return type(value) is int and 0 <= value < 2**53


def _as_json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
