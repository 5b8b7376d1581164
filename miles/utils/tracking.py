"""What a run leaves behind for people: its folder, its metrics by step, its log and its closing summary."""

import itertools
import json
import logging
import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.utils.errors import UserError

METRICS_NAME = "metrics.jsonl"
ARGUMENTS_NAME = "args.json"
LOG_NAME = "train.log"
ROLLOUT_KEY = "rollout/step"
"""Key of the rollout's number in each line of metrics."""
REWARD_KEY = "rollout/raw_reward"
TOKENS_KEY = "train/num_tokens"
LOSS_KEY = "train/loss"
SKIPPED_KEY = "train/skipped_steps"
"""Steps skipped so far, in the metrics of a skipped step, which have no loss."""
NUM_COMPARED_STEPS = 10
"""Steps at each end of a run over which the summary averages the reward."""

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
            records = [record for line in lines if (record := _parse_record(line)) is not None]
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
            raise UserError(f"cannot write metrics to {path} (--output-dir): {error}") from error

    def write(self, metrics: Mapping[str, float]) -> None:
        """Append one step. JSON has no NaN and no infinity; such a value becomes null."""
        record = {key: _as_json_number(value) for key, value in metrics.items()}
        self.records.append(record)
        self._file.write(f"{json.dumps(record)}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_skipped(metrics: Mapping[str, Any]) -> bool:
    """Whether the metrics are those of a step that was skipped, since nothing of it was left to train on."""
    return SKIPPED_KEY in metrics and LOSS_KEY not in metrics


def make_output_dir(args: Namespace, *, now: float) -> Path:
    """Create and return the run's folder: `args.output_dir`, else `runs/<date>-<time>-<mode>`, made anew.

    Args:
        args: The resolved arguments.
        now: Unix time in seconds.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        if args.output_dir is not None:
            path = Path(args.output_dir)
            path.mkdir(parents=True, exist_ok=True)
            return path
        stem = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{args.loss_aggregation}"
        Path("runs").mkdir(exist_ok=True)
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            path = Path("runs") / f"{stem}{suffix}"
            if not path.exists():
                path.mkdir()
                return path
    except OSError as error:
        raise UserError(f"cannot make the output folder (--output-dir): {error}") from error
    raise UserError(f"runs/{stem} and its numbered variants all exist; name a folder with --output-dir")


def write_arguments(directory: Path, args: Namespace) -> None:
    """Write the resolved arguments as JSON, sorted by name."""
    (directory / ARGUMENTS_NAME).write_text(json.dumps(vars(args), indent=2, sort_keys=True, default=str) + "\n")


@contextmanager
def console_logging(*, is_main: bool) -> Iterator[None]:
    """Show this package's log on stderr: everything of the main process, warnings of the others."""
    package = logging.getLogger("miles")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if is_main else logging.WARNING)
    level = package.level
    package.setLevel(logging.INFO)
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


@contextmanager
def file_logging(path: Path) -> Iterator[None]:
    """Append this package's log to a file as well."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("miles")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        handler.close()


def describe_run(
    metrics: MetricsLog, *, num_rollouts: int, num_planned: int, seconds: float, checkpoint: Path | None
) -> str:
    """Return the closing summary, for people.

    Args:
        metrics: The run's metrics.
        num_rollouts: Rollouts trained so far, those before a resumption included.
        num_planned: `--num-rollout`.
        seconds: Wall-clock time of this process.
        checkpoint: The newest checkpoint, if any.
    """
    records = metrics.records
    state = "finished" if num_rollouts >= num_planned else "stopped"
    tokens = sum(record.get(TOKENS_KEY) or 0 for record in records)
    num_skipped = sum(map(is_skipped, records))
    skipped = f" ({num_skipped} more skipped)" if num_skipped else ""
    lines = [
        f"{state}: {num_rollouts} of {num_planned} rollouts, {len(records) - num_skipped} optimizer steps{skipped}, "
        f"{tokens:,} response tokens trained on, {seconds:.1f} s"
    ]
    rewards = [record[REWARD_KEY] for record in records if record.get(REWARD_KEY) is not None]
    if rewards:
        count = min(NUM_COMPARED_STEPS, len(rewards))
        lines.append(
            f"reward: {_mean(rewards[:count]):.3f} over the first {count} steps, "
            f"{_mean(rewards[-count:]):.3f} over the last {count}"
        )
    lines.append(f"metrics, arguments and log: {metrics.path.parent}/{{{METRICS_NAME},{ARGUMENTS_NAME},{LOG_NAME}}}")
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint}")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _free_name(path: Path) -> Path:
    """Return `path` with the first number before its suffix that no file has yet: metrics.1.jsonl, ..."""
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return next(candidate for candidate in numbered if not candidate.exists())


def _parse_record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get(ROLLOUT_KEY), int) else None


def _as_json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
