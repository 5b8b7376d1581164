"""Files of the command line -> the columns of optimizer steps, as training would make them of each dump."""

from __future__ import annotations

import glob
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.ray.rollout.column_checks import check_prompt_tokens
from miles.ray.rollout.row_ids import rollout_ids_of, rows_by_id
from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    process_rollout_data_shard,
    split_train_data_by_dp,
)
from miles.rollout.debug_data import dump_path, read_dump_rows, sample_of_row
from miles.tools.aggregation_report.options import args_of_mode, with_values
from miles.utils.errors import UserError
from miles.utils.misc import load_function
from miles.utils.types import Sample

UNUSED_COLUMNS = ("rollout_log_probs", "metadata", "truncated", "sample_indices", "round_number")
"""Columns that no weight and no advantage depends on."""


@dataclass(frozen=True)
class Dump:
    """One dump, cut into optimizer steps.

    Attributes:
        path: Its file.
        shard: Columns over its rows, step after step, of the one data-parallel rank; token ids are left out.
        statuses: Rows by `Sample.Status`.
        refusals: Why training would refuse it, for the modes under which it would.
        knows_groups: Whether it is known which samples answer the same prompt, where advantages depend on that.
        complaints: What is wrong with each sample that was left out.
    """

    path: Path
    shard: dict[str, Any]
    statuses: dict[str, int]
    refusals: dict[LossAggregation, str]
    knows_groups: bool
    complaints: list[str]


def find_dumps(texts: Iterable[str]) -> list[Path]:
    """Return the files that the command line names, templates replaced by their files in the order of their numbers.

    Raises:
        UserError: a template that no file fits, or another placeholder than `{rollout_id}`; a file named twice.
    """
    paths = [path for text in texts for path in _files_of(text)]
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; each dump counts once, so leave one of the two out")
        seen.add(path.resolve())
    return paths


def _files_of(text: str) -> list[Path]:
    if Path(text).is_file():
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


def read_dump(args: Namespace, path: Path, *, skip_bad: bool) -> Dump:
    """Read one dump and cut it into steps.

    Args:
        args: From `options.training_args`.
        path: The file.
        skip_bad: Leave out samples that cannot be trained on. A file that cannot be read is an error either way.

    Returns:
        The dump; with an empty shard where no sample of it is left.

    Raises:
        UserError: what is wrong with the file, or without `skip_bad` with a sample, or with the dump as a whole.
    """
    samples, complaints = _parse(path, read_dump_rows(path), skip_bad=skip_bad)
    if skip_bad:
        complaints |= _drop_bad(_for_groups(args, samples.values()), path, samples)
    messages = [complaints[place] for place in sorted(complaints)]
    args = _for_groups(args, samples.values())
    shard, refusals = {}, {}
    if samples:
        shard, refusals = _cut(args, _columns(args, path, samples, hint="" if skip_bad else _HINT))
    statuses = Counter(sample.status.value for sample in samples.values())
    return Dump(path, shard, dict(statuses), refusals, args.knows_groups, messages)


_HINT = "; --skip-bad leaves such samples out"


def _parse(path: Path, rows: Sequence[Any], *, skip_bad: bool) -> tuple[dict[int, Sample], dict[int, str]]:
    """Return the samples of the rows that hold one, and what is wrong with the others, by place in the file."""
    samples: dict[int, Sample] = {}
    complaints: dict[int, str] = {}
    for place, row in enumerate(rows):
        try:
            samples[place] = sample_of_row(f"{path}, sample {place}", row)
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{error}{_HINT}") from error
            complaints[place] = str(error)
    return samples, complaints


def _for_groups(args: Namespace, samples: Collection[Sample]) -> Namespace:
    """Return the arguments with the size of a prompt group, and `knows_groups`: whether advantages are known.

    Rewards are normalized inside groups: those of `group_index`, else so many samples in a row. Where nothing says how
    many, they are left as they are.
    """
    size = args.n_samples_per_prompt
    if size is None and all(sample.group_index is not None for sample in samples):
        # As texts, since nothing has looked at the ids yet: one that is no integer may not be hashable.
        ids = zip(
            (str(sample.group_index) for sample in samples), map(str, rollout_ids_of(list(samples))), strict=True
        )
        size = most_frequent(Counter(group for group, _ in set(ids)).values())
    is_normalized = args.rewards_normalization and args.custom_reward_post_process_path is None
    knows_groups = size is not None or not is_normalized
    return with_values(
        args,
        n_samples_per_prompt=size,
        rewards_normalization=args.rewards_normalization and knows_groups,
        knows_groups=knows_groups,
    )


def most_frequent(sizes: Iterable[int]) -> int | None:
    """Return the most frequent of some numbers, the largest of equally frequent ones; None of none."""
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size), default=None)


def _drop_bad(args: Namespace, path: Path, samples: dict[int, Sample]) -> dict[int, str]:
    """Remove what conversion refuses, in place: single samples first, then rollouts; return the reasons by place."""
    complaints: dict[int, str] = {}
    for company in (_each_alone, _each_rollout):
        if _complaint(args, path, samples) is None:
            break
        for group in company(samples):
            complaint = _complaint(args, path, group)
            if complaint is not None:
                bad = group.keys() & samples.keys()
                complaints |= dict.fromkeys(bad, complaint)
                for place in bad:
                    del samples[place]
    return complaints


def _each_alone(samples: Mapping[int, Sample]) -> Iterator[dict[int, Sample]]:
    """Yield each sample, beside an empty one with log-probs where samples have them: all need them, or none."""
    has_log_probs = any(sample.rollout_log_probs is not None for sample in samples.values())
    for place, sample in list(samples.items()):
        fields = {"group_index": sample.group_index, "reward": sample.reward, "metadata": sample.metadata}
        witness = {-1: Sample(tokens=[0], rollout_log_probs=[], **fields)} if has_log_probs else {}
        yield {place: sample, **witness}


def _each_rollout(samples: Mapping[int, Sample]) -> Iterator[dict[int, Sample]]:
    places = list(samples)
    for rows in rows_by_id(rollout_ids_of(list(samples.values()))).values():
        yield {places[row]: samples[places[row]] for row in rows}


def _complaint(args: Namespace, path: Path, samples: Mapping[int, Sample]) -> str | None:
    """Return why samples cannot be converted together; None where they can, or there are none."""
    try:
        if samples:
            _columns(args, path, samples)
    except UserError as error:
        return str(error)
    return None


def _columns(args: Namespace, path: Path, samples: Mapping[int, Sample], *, hint: str = "") -> dict[str, Any]:
    """Return train data that training would accept.

    Raises:
        UserError: what training says, with the samples' places in the file.
    """
    post_process = args.custom_reward_post_process_path
    try:
        data = convert_samples_to_train_data(
            args, list(samples.values()), {}, None, load_function(post_process) if post_process else None
        )
        check_prompt_tokens(data)
    except UserError as error:
        message = _with_places(str(error), list(samples))
        is_of_samples = message.startswith(("sample", "rollout_id"))
        raise UserError(f"{path}{', ' if is_of_samples else ': '}{message}{hint * is_of_samples}") from error
    return data


def _with_places(message: str, places: Sequence[int]) -> str:
    """Return a message that begins with the positions of samples, with their places in the file instead."""
    head = re.match(r"samples? (\d+|\[[\d, ]+\])", message)
    if head is None:
        return message
    return re.sub(r"\d+", lambda position: str(places[int(position[0])]), head[0]) + message[head.end() :]


def _cut(args: Namespace, data: dict[str, Any]) -> tuple[dict[str, Any], dict[LossAggregation, str]]:
    """Return the rows in the order of their optimizer steps, and which modes would refuse them, with the reason."""
    if args.global_batch_size is None:
        args = with_values(args, global_batch_size=len(set(data.get("rollout_ids", range(len(data["tokens"]))))))
    shards, refusals = {}, {}
    for mode in LossAggregation:
        try:
            (shards[mode],) = split_train_data_by_dp(args_of_mode(args, mode.value, divisor=1.0), data, 1)
        except UserError as error:
            refusals[mode] = str(error)
    shard = process_rollout_data_shard(args, shards[LossAggregation.SAMPLE_MEAN])
    # No weight depends on a token's id.
    return {
        **{key: column for key, column in shard.items() if key not in UNUSED_COLUMNS},
        "tokens": [[] for _ in shard["tokens"]],
    }, refusals
