"""The uneven step that the invariance tests split, and the splits."""

import random
from dataclasses import replace

from miles.testing import Row, Split, Step

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
DIVISOR = 7.0


def uneven_rows() -> list[Row]:
    """Seven rows in three groups of uneven size: short ones with large values, long ones with small; row 2 is masked.

    Rows 3 and 4 are one rollout. Ratios to the old policy lie on both sides of the clip range.
    """
    draw = random.Random(5)
    lengths, groups = (2, 9, 4, 1, 3, 12, 5), (0, 0, 1, 1, 1, 2, 1)
    rollouts = (None, None, None, 7, 7, None, None)
    rows = []
    for index, (length, group, rollout) in enumerate(zip(lengths, groups, rollouts, strict=True)):
        mask = [0] * length if index == 2 else [1] + [draw.choice([0, 1, 1]) for _ in range(length - 1)]
        near = [draw.uniform(-2.8, -2.0) for _ in range(length)]
        rows.append(
            Row(
                mask=tuple(mask),
                prompt_length=draw.randint(1, 5),
                group=group,
                rollout=rollout,
                advantage=-0.75 if rollout else draw.choice([-1, 1]) * 3.0 / length,
                log_probs=tuple(near),
                rollout_log_probs=tuple(x + draw.uniform(-0.6, 0.9) for x in near),
                ref_log_probs=tuple(x + draw.uniform(-0.5, 0.5) for x in near),
                values=tuple(draw.uniform(-0.6, 0.6) for _ in range(length)),
                returns=tuple(draw.uniform(-2, 2) for _ in range(length)),
            )
        )
    return rows


def make_step(mode: str = "sample_mean", loss: str = "policy", *options: str, rows: list[Row] | None = None) -> Step:
    divisor = DIVISOR if mode == "constant" else None
    return Step(uneven_rows() if rows is None else rows, mode=mode, divisor=divisor, loss=loss, options=options)


def every_step(*options: str, tp: int = 1) -> list[Step]:
    """Each loss in each mode that it has; a value head is not split over tensor-parallel ranks."""
    steps = [make_step(mode, "policy", *options) for mode in MODES]
    for loss in ("sft", "value") if tp == 1 else ("sft",):
        steps += [make_step(mode, loss, *options) for mode in ("sample_mean", "token_mean")]
    # On-policy: the backend computes the old log-probs itself, by forward-only passes.
    on_policy = [replace(row, log_probs=None) for row in uneven_rows()]
    return [*steps, make_step("token_mean", "policy", *options, rows=on_policy)]


def both_schedules(**sizes: int) -> list[Split]:
    """Fixed and token-budget micro-batches; where there are ranks to deal to, the last has the masked row, or none.

    Rows of one group, and of one rollout, are on different ranks and in different micro-batches.
    """
    dp = sizes.get("dp", 1)
    if dp == 1:
        return [Split(**sizes, micro_batch_size=2), Split(**sizes, max_tokens=16)]
    others = [index for index in range(7) if index != 2]
    busy = [others[rank :: dp - 1] for rank in range(dp - 1)]
    return [
        Split(**sizes, micro_batch_size=2, rows=[*busy, [2]]),
        Split(**sizes, max_tokens=16, rows=[[2, *busy[0]], *busy[1:], []]),
    ]
