"""Two small dumps, three optimizer steps: ragged groups, a rollout of two rows, a masked one, groups of one reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from miles.rollout.debug_data import save_rollout_dump
from miles.utils.types import Sample
from tests.fast.oracle import Row

GLOBAL_BATCH_SIZE = 4

Step = list[tuple[Row, float]]
"""The rows of one optimizer step with their rewards, in the order of the file."""


def _row(mask: str, group: int, rollout: int | None = None) -> Row:
    return Row.of([int(bit) for bit in mask], [0] * len(mask), group=group, rollout=rollout)


FIRST: list[Step] = [  # 8 rollouts, cut after the fourth
    [
        (_row("111", 7), 1.0),
        (_row("01", 7, rollout=50), 0.0),
        (_row("00000", 7), 0.0),
        (_row("1111", 7, rollout=50), 0.0),
        (_row("111011110", 3), 1.0),
    ],
    [
        (_row("110111", 9), 0.0),
        (_row("11", 9), 0.0),
        (_row("1011", 4), 1.0),
        (_row("111111111101", 4), 0.0),
    ],
]
SECOND: list[Step] = [[(_row("1", 7), 0.0), (_row("1110111", 7), 1.0), (_row("101", 7), 1.0)]]  # group 7 of its own
DUMPS = [FIRST, SECOND]


def with_loss_weights(dumps: Sequence[Sequence[Step]]) -> list[list[Step]]:
    """The same dumps with loss weights of 0, 1/4, 1/2, 1 or 2, which floats hold exactly."""
    choices = [Fraction(2), Fraction(1, 2), Fraction(0), Fraction(1), Fraction(1, 4)]

    def weigh(row: Row, place: int) -> Row:
        return replace(row, loss_weights=tuple(choices[(place + 2 * t) % 5] for t in range(row.response_length)))

    return [
        [[(weigh(row, place), reward) for place, (row, reward) in enumerate(step)] for step in steps]
        for steps in dumps
    ]


def samples_of(steps: Sequence[Step]) -> list[Sample]:
    """The samples that a dump of the steps holds. Token ids are 0 and 1."""
    rows = [entry for step in steps for entry in step]
    return [
        Sample(
            group_index=row.group,
            index=index,
            rollout_id=row.rollout,
            tokens=[(index + t) % 2 for t in range(row.total_length)],
            response_length=row.response_length,
            reward=reward,
            loss_mask=list(row.mask),
            loss_weights=None if row.loss_weights is None else [float(weight) for weight in row.loss_weights],
            status=Sample.Status.TRUNCATED if row.response_length > 8 else Sample.Status.COMPLETED,
        )
        for index, (row, reward) in enumerate(rows)
    ]


def write_dumps(folder: Path, dumps: Sequence[Sequence[Step]] = DUMPS) -> list[str]:
    """Write one file for each dump; return their paths."""
    return [
        str(save_rollout_dump(f"{folder}/rollouts_{{rollout_id}}.pt", number, samples_of(steps)))
        for number, steps in enumerate(dumps)
    ]
