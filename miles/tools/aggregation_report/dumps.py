"""Files of the command line -> the columns of optimizer steps, as training would make them of each dump."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation
from miles.ray.rollout.column_checks import check_batch_sizes
from miles.ray.rollout.train_data_conversion import check_groups, process_rollout_data_shard, split_train_data_by_dp
from miles.rollout.debug_data import read_dump_rows, sample_of_row
from miles.tools.aggregation_report.bad_samples import Sieve, leave_out_bad, rollouts_of_rows
from miles.tools.aggregation_report.conversion import HINT, for_groups, reward_hook, to_columns, with_places
from miles.tools.aggregation_report.options import args_of_mode, with_values
from miles.utils.errors import UserError
from miles.utils.misc import dump_path
from miles.utils.options import Options
from miles.utils.types import Sample

UNUSED_COLUMNS = ("rollout_log_probs", "metadata", "truncated", "sample_indices", "round_number")
"""Columns that no weight and no advantage depends on."""


@dataclass(frozen=True)
class Dump:
    """One dump, split into optimizer steps.

    Attributes:
        path: Its file.
        shard: Columns over its rows, step after step, of the one data-parallel rank; token ids are left out.
        statuses: Rows by `Sample.Status`.
        refusals: Why training would refuse it, for the modes under which it would.
        knows_groups: Whether it is known which samples answer the same prompt, where advantages depend on that.
        without_group: Why it is not known which samples answer the same prompt; None if it is.
        complaints: What is wrong with each sample that was left out, one for all rows of a rollout.
    """

    path: Path
    shard: dict[str, Any]
    statuses: dict[str, int]
    refusals: dict[LossAggregation, str]
    knows_groups: bool
    without_group: str | None
    complaints: list[str]


def find_dumps(texts: Iterable[str]) -> list[Path]:
    """Return the files that the command line names, templates replaced by their files in the order of their numbers.

    Raises:
        UserError: a template that no file fits, or another placeholder than `{rollout_id}`; a file named twice.
    """
    paths = [path for text in texts for path in _files_of(text)]
    seen: set[str] = set()
    for path in paths:
        if os.path.realpath(path) in seen:
            raise UserError(f"{path} is named twice; each dump counts once, so leave one of the two out")
        seen.add(os.path.realpath(path))
    return paths


def _files_of(text: str) -> list[Path]:
    if os.path.isfile(text):
        return [Path(text)]
    first = dump_path(text, 0)
    if dump_path(text, 1) == first:  # no template
        return [first]
    numbered = sorted(_numbered_files(text))
    if not numbered:
        raise UserError(f"no file fits the template {text}; expected files such as {first}, one for each rollout")
    return [path for _, path in numbered]


def _numbered_files(template: str) -> Iterator[tuple[int, Path]]:
    """Yield (number, file) for the files that `dump_path` makes of the template."""
    parts = [(text, field is not None) for text, field, *_ in Formatter().parse(template)]
    pattern = re.compile("".join(re.escape(text) + r"(\d+)" * is_number for text, is_number in parts))
    for name in glob.glob("".join(glob.escape(text) + "*" * is_number for text, is_number in parts)):
        match = pattern.fullmatch(name)
        if match and dump_path(template, int(match[1])) == Path(name):
            yield int(match[1]), Path(name)


def read_dump(args: Options, path: Path, *, skip_bad: bool) -> Dump:
    """Read one dump and split it into steps.

    Args:
        args: From `options.training_args`.
        path: The file.
        skip_bad: Leave out samples that cannot be trained on. A file that cannot be read is an error either way.

    Returns:
        The dump; with an empty shard where no sample of it is left.

    Raises:
        UserError: what is wrong with the file, or without `skip_bad` with a sample, or with the dump as a whole.
    """
    rows = read_dump_rows(path)
    samples, unusable = _parse(path, rows, skip_bad=skip_bad)
    sieve = Sieve(samples, rollouts_of_rows(rows))
    sieve.drop(unusable)
    if skip_bad:
        leave_out_bad(args, path, sieve)
    samples, hint = sieve.samples, "" if skip_bad else HINT
    args, knows_groups = for_groups(args, samples.values())
    shard: dict[str, Any] = {}
    refusals: dict[LossAggregation, str] = {}
    if samples:
        data = to_columns(args, path, samples, reward_hook(args), hint=hint)
        shard, refusals = _split(args, path, samples, data)
    return Dump(
        path=path,
        shard=shard,
        statuses=dict(Counter(sample.status.value for sample in samples.values())),
        refusals=refusals,
        knows_groups=knows_groups,
        without_group=_without_group(path, samples, hint),
        complaints=sieve.messages(),
    )


def _parse(path: Path, rows: Sequence[Any], *, skip_bad: bool) -> tuple[dict[int, Sample], dict[int, str]]:
    """Return the samples of the rows that hold one, and what is wrong with the others, by place in the file."""
    samples: dict[int, Sample] = {}
    complaints: dict[int, str] = {}
    for place, row in enumerate(rows):
        try:
            samples[place] = sample_of_row(f"{path}, sample {place}", row)
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{error}{HINT}") from error
            complaints[place] = str(error)
    return samples, complaints


def _without_group(path: Path, samples: Mapping[int, Sample], hint: str) -> str | None:
    """Return why it is not known which samples answer the same prompt; None if it is."""
    places = [place for place, sample in samples.items() if sample.group_index is None]
    if not places:
        return None
    return (
        f"{path}: {len(places)} of {len(samples)} rows, first sample {places[0]}, have no group_index, so nothing "
        "says which samples answer the same prompt" + hint * (len(places) < len(samples))
    )


def _split(
    args: Options, path: Path, samples: Mapping[int, Sample], data: dict[str, Any]
) -> tuple[dict[str, Any], dict[LossAggregation, str]]:
    """Return the rows in the order of their optimizer steps, and which modes training would refuse, with the reason.

    Raises:
        UserError: training would refuse the rollout in every mode.
    """
    if args.global_batch_size is None:
        args = with_values(args, global_batch_size=len(set(data.get("rollout_ids", range(len(data["tokens"]))))))
    shards, refusals = {}, {}
    for mode in MODES.values():
        mode_args = args_of_mode(args, mode.name, divisor=1.0)
        try:
            check_groups(mode_args, list(samples.values()))
            check_batch_sizes(mode_args, data, dp_size=1)
            (shards[mode],) = split_train_data_by_dp(mode_args, data, 1)
        except UserError as error:
            refusals[mode] = with_places(str(error), list(samples))
    # Whatever it refuses, it refuses in every mode.
    if MODES["sample_mean"] in refusals:
        raise UserError(f"{path}: {refusals[MODES['sample_mean']]}")
    shard = process_rollout_data_shard(args, shards[MODES["sample_mean"]])
    # No weight depends on a token's id.
    return {
        **{key: column for key, column in shard.items() if key not in UNUSED_COLUMNS},
        "tokens": [[] for _ in shard["tokens"]],
    }, refusals
