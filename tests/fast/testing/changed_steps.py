"""Steps whose masks a correction changes and whose tokens weigh unequally, and splits that empty a rank of them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from miles.testing import Row, Split, Step
from tests.fast.testing.plugins import KEEP_EVEN, KEEP_LIKELY, KEEP_NEAR, ROOT_LENGTH
from tests.fast.testing.steps import MODES, make_step, uneven_rows

BOUNDS = ("--tis-clip", "1.5", "--tis-clip-low", "0.6")
TYPES = ("truncated", "icepop", "geometric_rejection")
COUNTINGS = (("--rejected-tokens", "drop"), ("--rejected-tokens", "keep"))
NORMALIZATIONS = (("--loss-weight-normalization", "weights"), ("--loss-weight-normalization", "tokens"))
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.05")
MATCH = (*KL, "--aux-loss-aggregation", "match")
ICEPOP = ("--use-tis", "--tis-type", "icepop", *BOUNDS)

LOG_RATIOS = (
    (0.2, -0.3),
    (0.1, 1.2, -0.2, -1.2, 0.3, 0.15, 1.2, -0.25, -1.3),
    (1.2, 0.1, -0.2, 0.3),
    (1.2,),
    (0.25, -1.2, 0.35),
    (0.2, -0.1, 1.2, 0.3, -0.4, 0.05, 0.35, -1.2, 0.1, -0.3, 0.2, 0.25),
    (-1.2, -1.1, 0.2, -1.3, 0.3),
    (1.2, 1.3, 0.9),
    (-1.2, -0.8),
)
"""log pi_train / pi_rollout of each token. Neither rejection leaves anything of rows 3, 7 and 8 within `BOUNDS`, the
geometric one nothing of row 6 either."""

LOSS_WEIGHTS = (
    (0.0, 0.0),
    None,
    (0.5, 1.0, 1.0, 2.0),
    (0.2,),
    (0.1, 0.05, 0.15),
    (0.02, 0.05, 0.01, 0.0, 0.03, 0.07, 0.02, 0.01, 0.04, 0.0, 0.05, 0.02),
    (0.25, 3.0, 0.5, 1.25, 0.75),
    (1.5, 0.25, 1.0),
    (0.5, 2.0),
)
"""Rollout 7 (rows 3 and 4) and group 2 (row 5) have totals below 1; of row 0 nothing counts."""


def changed_rows() -> list[Row]:
    """The uneven rows and a rollout of two rows, 7 and 8, that is a group of its own and is rejected whole."""
    draw = random.Random(9)
    rows = uneven_rows()
    for length in (3, 2):
        near = tuple(draw.uniform(-2.8, -2.0) for _ in range(length))
        rows.append(
            replace(
                rows[0],
                mask=(1,) * length,
                prompt_length=2 + length,
                group=3,
                rollout=9,
                advantage=1.5,
                log_probs=near,
                ref_log_probs=tuple(x + draw.uniform(-0.5, 0.5) for x in near),
                values=tuple(draw.uniform(-0.6, 0.6) for _ in near),
                returns=tuple(draw.uniform(-2, 2) for _ in near),
            )
        )
    return [
        replace(
            row,
            rollout_log_probs=tuple(x - y for x, y in zip(row.log_probs, ratios, strict=True)),
            loss_weights=weights,
        )
        for row, ratios, weights in zip(rows, LOG_RATIOS, LOSS_WEIGHTS, strict=True)
    ]


def changed_step(mode: str, *options: str, loss: str = "policy", rows: list[Row] | None = None, **fields) -> Step:
    step = make_step(mode, loss, *options, rows=changed_rows() if rows is None else rows)
    return replace(step, **fields)


def without(*columns: str) -> list[Row]:
    return [replace(row, **dict.fromkeys(columns)) for row in changed_rows()]


def corrected_steps() -> list[Step]:
    """Every built-in correction in every mode and both countings."""
    rows = without("loss_weights")
    return [
        changed_step(mode, "--use-tis", "--tis-type", type_, *BOUNDS, *counting, rows=rows)
        for mode, type_, counting in product(MODES, TYPES, COUNTINGS)
    ]


def weighted_steps() -> list[Step]:
    """Loss weights in every mode and loss, with both normalizations; in the last steps all of them are tiny."""
    steps = [changed_step(mode, *normalization) for mode, normalization in product(MODES, NORMALIZATIONS)]
    steps += [
        changed_step(mode, *normalization, loss=loss)
        for loss, mode, normalization in product(("sft", "value"), ("sample_mean", "token_mean"), NORMALIZATIONS)
    ]
    tiny = [
        replace(row, loss_weights=tuple(weight / 64 for weight in row.loss_weights or (1,) * len(row.mask)))
        for row in changed_rows()
    ]
    return [*steps, changed_step("token_mean", rows=tiny), changed_step("sample_mean", loss="sft", rows=tiny)]


def other_steps() -> list[Step]:
    """Auxiliary terms, corrections of one's own, metrics alone, a custom reducer; then all of it at once."""
    plain = without("loss_weights")
    steps = [changed_step(mode, *MATCH, *ICEPOP) for mode in MODES]
    steps += [changed_step(mode, *KL, *ICEPOP) for mode in ("prompt_mean", "constant")]
    steps += [
        changed_step(mode, "--use-tis", *counting, rows=without("rollout_log_probs"), correction=KEEP_LIKELY)
        for mode, counting in zip(MODES, COUNTINGS * 2, strict=True)
    ]
    alone = ("--get-mismatch-metrics", *BOUNDS)
    steps += [changed_step("prompt_mean", *alone, "--tis-type", type_, rows=plain) for type_ in TYPES]
    steps += [changed_step("token_mean", *alone, rows=plain, correction=KEEP_NEAR)]
    steps += [changed_step("prompt_mean", "--use-tis", rows=plain, correction=KEEP_EVEN)]
    steps += [changed_step(mode, *MATCH, *ICEPOP, reducer=ROOT_LENGTH) for mode in ("sample_mean", "token_mean")]
    on_policy = [replace(row, log_probs=None) for row in plain]
    steps += [changed_step(mode, *MATCH, *ICEPOP, rows=on_policy) for mode in ("prompt_mean", "token_mean")]
    steps += [changed_step("sample_mean", *alone, "--use-rollout-logprobs", rows=on_policy)]
    geometric = ("--use-tis", "--tis-type", "geometric_rejection", *BOUNDS)
    steps += [changed_step("token_mean", *geometric, *COUNTINGS[1], "--advantage-estimator", "gspo")]
    nasty = (*MATCH, "--get-mismatch-metrics", "--eps-clip-c", "1.1", "--normalize-advantages")
    each = list(product(MODES, COUNTINGS, NORMALIZATIONS))
    return steps + [
        changed_step(mode, *nasty, *counting, *normalization, correction=KEEP_NEAR)
        for mode, counting, normalization in each[:: len(MODES) - 1]
    ]


def emptied_steps() -> list[Step]:
    """Steps of which icepop leaves no token, where there still is something to divide by."""
    each = [*product(("sample_mean", "prompt_mean", "constant"), COUNTINGS), ("token_mean", COUNTINGS[1])]
    return [changed_step(mode, *MATCH, *ICEPOP, *counting, rows=emptied_rows()) for mode, counting in each]


def skipped_step() -> Step:
    """The one that leaves nothing to divide by."""
    return changed_step("token_mean", *ICEPOP, rows=emptied_rows())


def emptied_rows() -> list[Row]:
    return [replace(row, rollout_log_probs=tuple(x - 1.2 for x in row.log_probs)) for row in without("loss_weights")]


def emptying_splits(**sizes: int) -> list[Split]:
    """Fixed and token-budget micro-batches, in several orders of the rows.

    With two ranks, a correction leaves nothing of the last one's rows; the first has none; or rollouts 7 and 9 (rows 3
    and 4, 7 and 8) are on both.
    """
    if sizes.get("dp", 1) == 1:
        return [Split(**sizes, micro_batch_size=2), Split(**sizes, max_tokens=16)]
    return [
        Split(**sizes, micro_batch_size=2, rows=[[4, 0, 1, 5, 6], [2, 7, 3, 8]]),
        Split(**sizes, micro_batch_size=4, rows=[[], [7, 3, 0, 8, 5, 4, 1, 6, 2]]),
        Split(**sizes, max_tokens=16, rows=[[8, 0, 3, 5], [7, 1, 2, 4, 6]]),
    ]


def every_changed_step() -> list[Step]:
    return [*corrected_steps(), *weighted_steps(), *other_steps(), *emptied_steps(), skipped_step()]


def alternate(steps: Sequence[Step], splits: Sequence[Split]) -> list[tuple[Step, Split]]:
    """Give each step one of the splits, such that each occurs with every option that changes along the steps."""
    return [(step, splits[(place + place // len(splits)) % len(splits)]) for place, step in enumerate(steps)]
