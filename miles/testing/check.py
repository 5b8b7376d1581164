"""The check itself: every split of a step has to give the oracle's value, gradient and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from miles.testing.backends import Backend
from miles.testing.oracle import expected_outcome
from miles.testing.step import Outcome, Split, Step
from miles.testing.worlds import WorldError
from miles.utils.errors import UserError

ATOL = 1e-6
"""What float32 leaves of a number near 0, next to others of size 1."""

MAX_LISTED = 8
"""Differences that a message lists."""


@dataclass(frozen=True)
class Failure:
    """One split under which a step does not come to what it has to.

    Attributes:
        step: The step.
        split: The split.
        differences: One line for each number that differs: its name, expected and got.
    """

    step: Step
    split: Split
    differences: list[str]

    def __str__(self) -> str:
        listed = self.differences[:MAX_LISTED]
        if len(self.differences) > MAX_LISTED:
            listed.append(f"and {len(self.differences) - MAX_LISTED} more")
        ranks, batches, rows = self.split.size(self.step)
        head = f"{self.step} | {self.split} ({ranks} ranks, {batches} micro-batches, {rows} rows):"
        return "\n    ".join([head, *listed])


def check_invariance(
    steps: Step | Sequence[Step],
    backend: Backend,
    splits: Iterable[Split],
    *,
    rtol: float = 1e-5,
    shrink: bool = True,
) -> None:
    """Check that value, gradient and every metric of each step are the unsplit float64 ones under every split.

    Args:
        steps: One step or several.
        backend: Runs them.
        splits: Ways to split each step. Splits of one topology run in one group of processes.
        rtol: Largest relative difference; see `differences`.
        shrink: After a failure, look for fewer rows that still fail, and show those.

    Raises:
        AssertionError: a split fails. The message shows the smallest: the fewest ranks, then micro-batches, then rows.
        UserError: a step or a split that the backend refuses.
        WorldError: a rank failed, or did not finish in time.
    """
    steps = [steps] if isinstance(steps, Step) else list(steps)
    splits = list(splits)
    jobs = [(step, split) for step in steps for split in splits]
    if not jobs:
        raise ValueError("nothing to check: give at least one step and one split")
    failures = find_failures(jobs, backend, rtol=rtol)
    if not failures:
        return
    smallest = min(failures, key=lambda failure: failure.split.size(failure.step))
    if shrink:
        smallest = drop_rows(smallest, backend, rtol=rtol)
    raise AssertionError(f"{len(failures)} of {len(jobs)} splits on {backend} fail; the smallest:\n  {smallest}")


def find_failures(jobs: Sequence[tuple[Step, Split]], backend: Backend, *, rtol: float = 1e-5) -> list[Failure]:
    """Return the jobs whose outcome differs from the oracle's, in their order."""
    expected = [expected_outcome(step) for step, _ in jobs]
    failures = []
    for (step, split), wanted, outcome in zip(jobs, expected, backend.run_many(jobs), strict=True):
        found = differences(wanted, outcome, rtol=rtol)
        if found:
            failures.append(Failure(step, split, found))
    return failures


def differences(expected: Outcome, got: Outcome, *, rtol: float) -> list[str]:
    """Say in one line each what differs: value, metrics, gradients.

    A number may differ by rtol * |expected| + 1e-6; a gradient by rtol times the largest of its parameter + 1e-6 times
    the largest of all, where float32 has put its rounding. A NaN differs from everything.
    """
    found = _number_differences({"value": expected.value}, {"value": got.value}, rtol)
    found += _number_differences(expected.metrics, got.metrics, rtol, prefix="metric ")
    if expected.gradient.keys() != got.gradient.keys():
        return [*found, f"gradient: expected of {len(expected.gradient)} parameters, got {len(got.gradient)}"]
    largest = max((part.abs().max().item() for part in expected.gradient.values()), default=0.0)
    for name, part in expected.gradient.items():
        error = (got.gradient[name] - part).abs()
        bound = rtol * part.abs().max().item() + ATOL * largest
        if not bool((error <= bound).all()):
            place = int(torch.where(error.isnan(), torch.inf, error).argmax())
            there = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), part.shape))
            found.append(
                f"gradient {name}{list(there)}: expected {part.flatten()[place]:.9g}, "
                f"got {got.gradient[name].flatten()[place]:.9g}"
            )
    return found


def _number_differences(
    expected: Mapping[str, float], got: Mapping[str, float], rtol: float, *, prefix: str = ""
) -> list[str]:
    found = [f"{prefix}{name}: expected {value:.9g}, got none" for name, value in expected.items() if name not in got]
    found += [f"{prefix}{name}: expected none, got {value:.9g}" for name, value in got.items() if name not in expected]
    return found + [
        f"{prefix}{name}: expected {value:.9g}, got {got[name]:.9g}"
        for name, value in expected.items()
        if name in got and not abs(got[name] - value) <= rtol * abs(value) + ATOL
    ]


def drop_rows(failure: Failure, backend: Backend, *, rtol: float = 1e-5) -> Failure:
    """Leave out one row after another as long as the split still fails, and return the last failure."""
    while True:
        jobs = (_without_row(failure, index) for index in range(len(failure.step.rows)))
        smaller = [(step, split) for step, split in jobs if step is not None]
        try:
            found = find_failures(smaller, backend, rtol=rtol) if smaller else []
        except (WorldError, UserError):
            return failure  # something else than a wrong number
        if not found:
            return failure
        failure = found[0]


def _without_row(failure: Failure, index: int) -> tuple[Step | None, Split]:
    """Return the job without one of its rows; no step where that leaves no active token."""
    rows = [row for place, row in enumerate(failure.step.rows) if place != index]
    held = failure.split.rows_by_rank(len(failure.step.rows))
    left = [[row - (row > index) for row in rows_of_rank if row != index] for rows_of_rank in held]
    step = replace(failure.step, rows=rows) if any(map(any, (row.mask for row in rows))) else None
    return step, replace(failure.split, rows=left)
