"""What there is to say of the data of a step, one sample after another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from miles.testing.averages import Masks, main_weighing, rollout_keys, row_weights
from miles.testing.step import Row, Step
from miles.utils.options import Options


def step_facts(
    args: Options, step: Step, kept: Masks, main_term: Callable[[Sequence[Tensor]], float]
) -> dict[str, float]:
    """Return the step's counts and what its samples weigh, by metric name.

    Args:
        args: The run's arguments.
        step: The step.
        kept: For each row the tokens that a correction left.
        main_term: Returns what the loss's main term comes to over the step from the values of each row, `[T]`. The
            weight of a sample is what that is where its tokens have the value 1 and all others 0.
    """
    samples: dict[Hashable, list[int]] = {}
    for index, key in enumerate(rollout_keys(step.rows)):
        samples.setdefault(key, []).append(index)
    weights = [
        main_term([torch.full((row.response_length,), float(index in inside)) for index, row in enumerate(step.rows)])
        for inside in samples.values()
    ]
    lengths = [sum(step.rows[index].response_length for index in inside) for inside in samples.values()]
    longest = [weight for place, weight in enumerate(weights) if _is_in_longest_quarter(lengths, place)]
    squares = sum(weight**2 for weight in weights)
    return {
        "num_tokens": sum(sum(row.mask) for row in step.rows),
        **_term_counts(args, step.rows, kept),
        "num_samples": len(samples),
        "num_prompts": len({row.group for row in step.rows}),
        "num_masked_samples": sum(not any(any(step.rows[index].mask) for index in x) for x in samples.values()),
        "effective_samples": sum(weights) ** 2 / squares if squares else 0.0,
        "longest_quarter_weight": sum(longest) / sum(weights) if squares else 0.0,
    }


def _is_in_longest_quarter(lengths: Sequence[int], place: int) -> bool:
    """Whether less than a quarter of the samples are longer than one of them; of equals the later counts as longer."""
    longer = sum((other, where) > (lengths[place], place) for where, other in enumerate(lengths))
    return 4 * longer < len(lengths)


def _term_counts(args: Options, rows: Sequence[Row], kept: Masks) -> dict[str, float]:
    """Return the tokens that the main term sums and what it counts of them."""
    num_kept = sum(
        bool(bit and weight)
        for bits, row in zip(kept, rows, strict=True)
        for bit, weight in zip(bits, row_weights(row), strict=True)
    )
    return {"num_kept_tokens": num_kept, "num_counted_tokens": main_weighing(args, rows, kept).total}
