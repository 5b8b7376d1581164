"""`--skip-bad`: samples that cannot be trained on are left out, each a whole rollout, with what is wrong with them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from miles.ray.rollout.rewards import RewardPostProcess
from miles.ray.rollout.row_groups import name_of, rollout_ids_of, rows_by_id
from miles.tools.aggregation_report.conversion import SamplesError, reward_hook, to_columns
from miles.utils.options import Options
from miles.utils.types import Sample


@dataclass
class Sieve:
    """The rows of a dump that are left, and why others are not.

    Attributes:
        samples: Those left, by their places in the file.
        rollouts: The rollout of each row of the file, good or bad.
        complaints: By rollout, what is wrong with the first bad row found of it.
    """

    samples: dict[int, Sample]
    rollouts: Sequence[Hashable]
    complaints: dict[Hashable, str] = field(default_factory=dict)

    def drop(self, bad: Mapping[int, str]) -> None:
        """Leave out the whole rollouts of some rows.

        Args:
            bad: What is wrong, by place in the file.
        """
        for place, complaint in bad.items():
            self.complaints.setdefault(self.rollouts[place], complaint)
        for place in [place for place in self.samples if self.rollouts[place] in self.complaints]:
            del self.samples[place]

    def messages(self) -> list[str]:
        """Return what is wrong with each rollout that was left out, in the order of the file."""
        return [
            self.complaints[rollout] + (f"; left out with all rows of its rollout, {places}" if places[1:] else "")
            for rollout, places in rows_by_id(self.rollouts).items()
            if rollout in self.complaints
        ]


def rollouts_of_rows(rows: Sequence[Any]) -> list[Hashable]:
    """Return the rollout of each row of a file, usable or not; a row that names none is its own."""
    ids = [row.get("rollout_id") if isinstance(row, Mapping) else None for row in rows]
    return [int(id_) if isinstance(id_, Integral) else ("row", place) for place, id_ in enumerate(ids)]


def leave_out_bad(args: Options, path: Path, sieve: Sieve) -> None:
    """Drop samples without a group where most have one and, if conversion refuses what is left, what it refuses.

    Rows are looked at alone, then beside one another, then as rollouts. What only the whole shows, as a person's own
    processing of rewards does, goes last, one sample at a time as training names them.
    """
    hook = reward_hook(args)
    having, lacking = _split(sieve.samples, "group_index")
    if len(having) >= len(lacking):
        sieve.drop(_unlike(path, sieve.samples, lacking, "no group_index", "set it to the prompt that it answers"))
    if _complaint(args, path, sieve.samples, hook) is None:
        return
    neutral = None if hook is None else _no_rewards
    sieve.drop(_bad_alone(args, path, _as_in_company(sieve.samples), neutral))
    sieve.drop(_odd_log_probs(path, sieve.samples))
    sieve.drop(_bad_rollouts(args, path, _as_in_company(sieve.samples), neutral))
    while (error := _complaint(args, path, sieve.samples, hook)) is not None and error.places:
        sieve.drop({error.places[0]: str(error)})


def _no_rewards(args: Options, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Stand in for a person's own processing, which may need whole groups."""
    return [0.0] * len(samples), [0.0] * len(samples)


def _as_in_company(samples: Mapping[int, Sample]) -> dict[int, Sample]:
    """Return the samples without the metadata that not all of them have, which becomes no column."""
    names = [set(sample.metadata) for sample in samples.values() if isinstance(sample.metadata, Mapping)]
    common = set.intersection(*names) if len(names) == len(samples) > 0 else set()
    return {
        place: (
            replace(sample, metadata={key: sample.metadata[key] for key in common})
            if isinstance(sample.metadata, Mapping)
            else sample
        )
        for place, sample in samples.items()
    }


def _bad_alone(
    args: Options, path: Path, samples: Mapping[int, Sample], hook: RewardPostProcess | None
) -> dict[int, str]:
    """Return what is wrong with rows for themselves."""
    bad = {}
    for place, sample in samples.items():
        error = _complaint(args, path, {place: sample}, hook)
        if error is not None:
            bad[place] = str(error)
    return bad


def _odd_log_probs(path: Path, samples: Mapping[int, Sample]) -> dict[int, str]:
    """Return what is wrong with rows that have log-probs where most have none, or none where most have some."""
    having, lacking = _split(samples, "rollout_log_probs")
    advice = "give them on every sample of the rollout, or on none"
    if len(having) >= len(lacking):
        return _unlike(path, samples, lacking, "no rollout_log_probs", advice)
    return _unlike(path, samples, having, "rollout_log_probs", advice)


def _split(samples: Mapping[int, Sample], name: str) -> tuple[list[int], list[int]]:
    """Return the places of the samples that have a field, and of those that lack it."""
    has = {place: getattr(sample, name) is not None for place, sample in samples.items()}
    return [place for place in has if has[place]], [place for place in has if not has[place]]


def _unlike(
    path: Path, samples: Mapping[int, Sample], places: Sequence[int], what: str, advice: str
) -> dict[int, str]:
    others = len(samples) - len(places)
    return {
        place: f"{path}, {name_of(samples[place], place)} has {what}, unlike {others} others; {advice}"
        for place in places
    }


def _bad_rollouts(
    args: Options, path: Path, samples: Mapping[int, Sample], hook: RewardPostProcess | None
) -> dict[int, str]:
    """Return what is wrong with rollouts of several rows, by the first of them."""
    places, bad = list(samples), {}
    for rows in rows_by_id(rollout_ids_of(list(samples.values()))).values():
        error = _complaint(args, path, {places[row]: samples[places[row]] for row in rows}, hook) if rows[1:] else None
        if error is not None:
            bad[places[rows[0]]] = str(error)
    return bad


def _complaint(
    args: Options, path: Path, samples: Mapping[int, Sample], hook: RewardPostProcess | None
) -> SamplesError | None:
    """Return why samples cannot be converted together; None where they can, or there are none."""
    if hook is not None:
        samples = copy.deepcopy(dict(samples))  # a trial of the hook, which may change samples in place
    try:
        if samples:
            to_columns(args, path, samples, hook)
    except SamplesError as error:
        return error
    return None
