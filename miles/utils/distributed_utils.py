"""Collectives on Python objects, and errors that stop every rank."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from miles.utils.errors import RankError, UserError

T = TypeVar("T")


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value` in rank order; without an initialised process group, this process's alone."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on each rank and let a failure on one of them stop all of them.

    Without this, the rank that fails leaves the others waiting in their next collective.

    Args:
        function: Work of this rank; must not itself run collectives.
        group: Ranks that take part; None is the world.

    Returns:
        What `function` returned here.

    Raises:
        UserError: some rank raised a UserError; the message is the first rank's.
        RuntimeError: some other rank raised anything else. The rank that failed raises its own exception.
    """
    result, failure = _attempt(function)
    _raise_together(failure, all_gather_objects(_told(failure), group))
    return result[0]


def gather_from_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what `function()` returned on each rank, in rank order, with errors as in `on_every_rank`.

    Args:
        function: Work of this rank; must not itself run collectives. What it returns must be picklable, and small.
        group: Ranks that take part; None is the world.
    """
    result, failure = _attempt(function)
    gathered = all_gather_objects((result, _told(failure)), group)
    _raise_together(failure, [report for _, report in gathered])
    return [results[0] for results, _ in gathered]


def _attempt(function: Callable[[], T]) -> tuple[list[T], Exception | None]:
    try:
        return [function()], None
    except Exception as error:
        return [], error


_Report = tuple[bool, str, str]
"""What other ranks are told of an exception: whether it is a UserError, its type and message, its message."""


def _told(failure: Exception | None) -> _Report | None:
    return (
        None
        if failure is None
        else (isinstance(failure, UserError), f"{type(failure).__name__}: {failure}", str(failure))
    )


def _raise_together(failure: Exception | None, reports: Sequence[_Report | None]) -> None:
    """Raise on every rank where one has failed."""
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            is_user_error, described, message = report
            raise UserError(message) if is_user_error else RuntimeError(f"rank {rank} failed: {described}")


def on_this_rank(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, which may run collectives, where a plug-in's mistake may be this rank's alone.

    Raises:
        RankError: `function` raised a UserError.
    """
    try:
        return function(*args)
    except UserError as error:
        raise RankError(str(error)) from error
