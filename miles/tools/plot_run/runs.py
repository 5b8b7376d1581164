"""Training runs as their folders tell them: metrics by step, arguments, and which runs repeat one another."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles.utils.errors import UserError
from miles.utils.run_files import ARGUMENTS_NAME, METRICS_NAME
from miles.utils.tracking import ROLLOUT_KEY, STEP_KEY
from miles.utils.tracking.metrics_log import parse_record

MODE_ARGUMENT = "loss_aggregation"
DIVISOR_ARGUMENT = "loss_aggregation_divisor"
UNTOLD_ARGUMENTS = frozenset(
    {
        "calculate_per_token_loss",  # another spelling of the mode, which is told
        "custom_config_path",  # what the file says is among the arguments
        "load",
        "output_dir",
        "rollout_seed",
        "save",
        "save_debug_rollout_data",
        "save_interval",
        "seed",
        "tracking",
    }
)
"""Arguments in which repetitions of one run differ: seeds, and where files and metrics go."""
UNTOLD_PREFIX = "wandb_"
LARGEST_DRAWN = 1e300
"""Of larger magnitudes, sums and axes would leave float64."""
_TYPED_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    MODE_ARGUMENT: (lambda value: isinstance(value, str), "a mode's name"),
    DIVISOR_ARGUMENT: (lambda value: type(value) in (int, float) and 0 < value <= LARGEST_DRAWN, "a positive number"),
}
"""Arguments that are used for more than a label: what they must be, and the same in words."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        directory: The folder.
        arguments: The run's resolved arguments; None where they cannot be read.
        records: Metrics of each optimizer step, ascending by step; at least one.
    """

    directory: Path
    arguments: Mapping[str, Any] | None
    records: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the run's steps, [K] int64, and the values of `key`, [K] float64: NaN where a step has none."""
        steps = np.array([record[STEP_KEY] for record in self.records], dtype=np.int64)
        values = np.array([record.get(key) for record in self.records], dtype=np.float64)
        return steps, np.where(np.abs(values) <= LARGEST_DRAWN, values, np.nan)


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seeds and folders only.

    Attributes:
        label: What sets them apart from the other groups.
        mode: Their `--loss-aggregation`, None where it is not known.
        runs: The runs, at least one.
        setting: What sets them apart from other groups of their mode: the values of all arguments that differ within
            a mode. Groups of two modes may have the same.
    """

    label: str
    mode: str | None
    runs: Sequence[Run]
    setting: tuple[str, ...] = ()


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders; one that has no step yet is left out, with a warning.

    Raises:
        UserError: a folder is no run's, a file cannot be read, or no run has a step.
    """
    _refuse_repeated(directories)
    runs = [run for path in directories if (run := read_run(path)).records]
    if not runs:
        raise UserError(f"nothing to draw: none of {', '.join(map(str, directories))} has finished a step yet")
    return runs


def _refuse_repeated(directories: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for path in directories:
        place = os.path.realpath(path)
        if place in seen:
            same = f"{path} twice" if seen[place] == path else f"{seen[place]} and {path}, which are one folder"
            raise UserError(f"each run is drawn once, got {same}; name it once")
        seen[place] = path


def read_run(directory: Path) -> Run:
    """Read a run's folder, also while it is being written; a last line that is not finished is left out.

    Raises:
        UserError: it is no run's folder, or a file in it cannot be read or holds something else.
    """
    path = directory / METRICS_NAME
    if not os.path.isdir(directory):  # also where its name is too long to be one
        raise UserError(f"{directory} is not a folder; expected one that train.py wrote (--output-dir)")
    if not os.path.isfile(path):
        raise UserError(
            f"{directory} has no {METRICS_NAME}; expected a folder that train.py wrote (--output-dir). "
            f"If it holds such folders, name these: {directory}/*"
        )
    records = _read_metrics(path)
    if not records:
        logger.warning("%s has no step yet; the run is left out", path)
    return Run(directory, _read_arguments(directory / ARGUMENTS_NAME), records)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of `metrics.jsonl` by step; of a step that stands there twice, the later line counts."""
    text = _read_text(path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    by_step = {}
    for number, line in lines:
        record = parse_record(line)
        if record is not None:
            by_step[record[STEP_KEY]] = record
        elif number == lines[-1][0] and not text.endswith("\n"):
            logger.warning("%s line %d is not finished, as a run that was stopped leaves it; left out", path, number)
        else:
            raise UserError(
                f"{path} line {number} is damaged: expected a JSON object of numbers and nulls with whole numbers "
                f"{ROLLOUT_KEY!r} and {STEP_KEY!r}, got {_shortened(line)}; remove the line to draw the others"
            )
    return [by_step[step] for step in sorted(by_step)]


def _shortened(text: str, length: int = 60) -> str:
    return ascii(text if len(text) <= length else f"{text[:length]}...")


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
    """Put runs that differ in their seeds and folders only into one group, in the order in which they come.

    A run whose arguments are not known is a group of its own.
    """
    keys = differing_arguments(runs)
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        values = None if run.arguments is None else _values(run.arguments, keys)
        groups.setdefault(run.directory if values is None else values, []).append(run)
    told = _differing_within_modes([members[0] for members in groups.values()], keys)
    return [_make_group(members, keys, told) for members in groups.values()]


def differing_arguments(runs: Sequence[Run]) -> list[str]:
    """Return the arguments in which runs differ, the mode first; one that a run lacks counts as null."""
    known = [run.arguments for run in runs if run.arguments is not None]
    names = sorted(
        {name for arguments in known for name in arguments if _is_told(name)},
        key=lambda name: (name != MODE_ARGUMENT, name),
    )
    return [name for name in names if len({_as_json(arguments.get(name)) for arguments in known}) > 1]


def _differing_within_modes(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Return those of `keys` in which runs of one mode differ; what goes with the mode, as its divisor, is not."""
    known = [run.arguments for run in runs if run.arguments is not None]
    modes = {_as_json(arguments.get(MODE_ARGUMENT)) for arguments in known}
    num_pairs = {key: len({_values(arguments, (MODE_ARGUMENT, key)) for arguments in known}) for key in keys}
    return [key for key in keys if num_pairs[key] > len(modes)]


def _make_group(runs: Sequence[Run], keys: Sequence[str], setting_keys: Sequence[str]) -> RunGroup:
    arguments = runs[0].arguments
    told = [] if arguments is None else [_describe(key, arguments.get(key)) for key in keys]
    label = ", ".join(filter(None, told)) or ", ".join(run.directory.resolve().name for run in runs)
    setting = (str(runs[0].directory),) if arguments is None else _values(arguments, setting_keys)
    mode = None if arguments is None else arguments.get(MODE_ARGUMENT)
    return RunGroup(escape(label, str.isprintable), mode, runs, setting)


def escape(text: str, is_shown: Callable[[str], bool]) -> str:
    """Return `text` with each character that cannot be shown as its escape: a backslash, a letter, its number.

    Args:
        text: From a person: a folder's name, say, which may hold anything.
        is_shown: Of one character.
    """
    return "".join(char if is_shown(char) else char.encode("unicode_escape").decode() for char in text)


def _describe(key: str, value: Any) -> str:
    if key == MODE_ARGUMENT:
        return str(value)
    if key == DIVISOR_ARGUMENT:  # of one mode only
        return "" if value is None else f"L = {value:g}"
    return f"{key} = {'unset' if value is None else value}"


def _is_told(name: str) -> bool:
    return name not in UNTOLD_ARGUMENTS and not name.startswith(UNTOLD_PREFIX)


def _read_arguments(path: Path) -> dict[str, Any] | None:
    """Return a run's arguments, None where it has no such file, in whose place the folder's name tells of it."""
    if not os.path.exists(path):
        logger.warning("%s is missing; the run is named after its folder", path)
        return None
    try:
        arguments = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        arguments = None
    remedy = "remove the file to name the run after its folder"
    if not isinstance(arguments, dict):
        raise UserError(f"{path} is damaged: expected one JSON object, the run's arguments; {remedy}")
    for name, (is_valid, expected) in _TYPED_ARGUMENTS.items():
        value = arguments.get(name)
        if value is not None and not is_valid(value):
            raise UserError(f"{path} is no run's: {name} must be {expected}, got {_shortened(repr(value))}; {remedy}")
    return arguments


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _values(arguments: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(_as_json(arguments.get(key)) for key in keys)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
