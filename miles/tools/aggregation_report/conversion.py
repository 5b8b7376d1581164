"""Samples of a dump -> training's columns, with messages that name samples by their places in the file."""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from miles.ray.rollout.column_checks import check_prompt_tokens
from miles.ray.rollout.rewards import RewardPostProcess
from miles.ray.rollout.row_groups import rollout_ids_of
from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
from miles.tools.aggregation_report.options import with_values
from miles.utils.errors import UserError
from miles.utils.misc import load_function
from miles.utils.options import Options
from miles.utils.types import Sample

HINT = "; --skip-bad leaves such samples out"
HOOK = "--custom-reward-post-process-path"

_NAMES = re.compile(r"^samples? (?:\d+|\[[\d, ]+\])|\bsample \d+(?= \(index=)")
"""What messages of training call samples, by their positions."""


class SamplesError(UserError):
    """What training says of samples.

    Attributes:
        places: Those of the samples that the message begins with; empty where it is about all of them.
    """

    def __init__(self, message: str, places: Sequence[int]) -> None:
        super().__init__(message)
        self.places = places


def for_groups(args: Options, samples: Collection[Sample]) -> tuple[Options, bool]:
    """Return the arguments with the size of a prompt group, and whether advantages are known.

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
    is_normalized = args.rewards_normalization and knows_groups
    return with_values(args, n_samples_per_prompt=size, rewards_normalization=is_normalized), knows_groups


def most_frequent(sizes: Iterable[int]) -> int | None:
    """Return the most frequent of some numbers, the largest of equally frequent ones; None of none."""
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size), default=None)


def reward_hook(args: Options) -> RewardPostProcess | None:
    """Return the person's own processing of rewards, if any, which raises nothing but a UserError."""
    path = args.custom_reward_post_process_path
    if path is None:
        return None
    function = load_function(path)

    def call(args: Options, samples: Sequence[Sample]) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # the standard output is the report's
                return function(args, samples)
        except Exception as error:  # whatever a plug-in raises is the person's to read
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"{HOOK} {path} raised {words} ({Path(where.filename).name}:{where.lineno})") from error

    return call


def to_columns(
    args: Options, path: Path, samples: Mapping[int, Sample], hook: RewardPostProcess | None, *, hint: str = ""
) -> dict[str, Any]:
    """Return train data that training would accept, with prompt groups where every sample has one.

    Args:
        args: From `options.training_args`.
        path: The file.
        samples: By their places in it.
        hook: Of `reward_hook`.
        hint: How a message about samples ends.

    Raises:
        SamplesError: what training says.
    """
    try:
        # With ragged groups every mode gets the columns of prompts.
        grouped, _ = for_groups(args, samples.values())
        args = with_values(grouped, prompt_groups="ragged")
        data = convert_samples_to_train_data(args, list(samples.values()), {}, None, hook)
        check_prompt_tokens(data)
    except UserError as error:
        message = with_places(str(error), list(samples))
        head = re.match(r"samples? (\d+|\[[\d, ]+\])", message)
        is_of_samples = head is not None or message.startswith("rollout_id")
        raise SamplesError(
            f"{path}{', ' if is_of_samples else ': '}{message}{hint * is_of_samples}",
            [int(place) for place in re.findall(r"\d+", head[0])] if head else [],
        ) from error
    return data


def with_places(message: str, places: Sequence[int]) -> str:
    """Return a message with the places of its samples in the file for their positions."""
    return _NAMES.sub(lambda name: re.sub(r"\d+", lambda number: str(places[int(number[0])]), name[0]), message)
