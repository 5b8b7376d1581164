"""Random uneven rows with a random policy, drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch
from cuts import Shape
from oracle import Row
from step import Plan, vocabulary

GROUPS, SAMPLES = 4, 2


ROWS_PER_ROLLOUT = (1, 3, 2, 2, 3, 1, 2, 2)


def split_rollouts(made: tuple[Row, ...]) -> tuple[Row, ...]:
    """Store each of the rows as a rollout of several, the active ones cut differently."""
    return tuple(
        replace(row, mask=mask, values=row.values[: len(mask)], rollout=5 * index)
        for index, (row, count) in enumerate(zip(made, ROWS_PER_ROLLOUT, strict=True))
        for mask in [row.mask, row.mask[::-1], (*row.mask[:1], 1)[: len(row.mask)]][:count]
    )


def rows(seed: int, *, masked: bool = True, several: bool = False) -> tuple[Row, ...]:
    """Groups of samples of unequal lengths.

    Args:
        seed: Of the draw.
        masked: Some rows, and sometimes a whole group, have no active token.
        several: Rollouts are stored as several rows.
    """
    draw = random.Random(seed)
    made = []
    for group in range(GROUPS):
        silent = masked and draw.random() < 0.2
        for _ in range(SAMPLES):
            length = draw.randint(1, 9)
            mask = [int(draw.random() < 0.7) for _ in range(length)]
            if silent or (masked and draw.random() < 0.2):
                mask = [0] * length
            elif not any(mask):
                mask[draw.randrange(length)] = 1
            made.append(Row.of(mask, [0] * length, group=10 + 3 * group, prompt_length=draw.randint(1, 4)))
    made[0] = Row.of([1, 0, 1], [0] * 3, group=10, prompt_length=2)  # no step without an active token
    made[-1] = Row.of([1, 1, 1, 1, 0, 1, 1, 1], [0] * 8, group=10 + 3 * (GROUPS - 1), prompt_length=1)
    return split_rollouts(tuple(made)) if several else tuple(made)


def plan(seed: int, made: tuple[Row, ...], shape: Shape, flags: tuple[str, ...], **more: Any) -> Plan:
    """A plan of the rows; ratios spread well beyond the clipping range."""
    draw = random.Random(seed + 1)
    generator = torch.Generator().manual_seed(seed)
    size = vocabulary(made)
    return Plan(
        *shape,
        made,
        flags,
        advantages=tuple(tuple(draw.gauss(0, 2) for _ in range(row.response_length)) for row in made),
        old_log_probs=tuple(
            tuple(-math.log(size) + draw.gauss(0, 0.3) for _ in range(row.response_length)) for row in made
        ),
        table=torch.randn(size, size, generator=generator) * 0.3,
        **more,
    )
