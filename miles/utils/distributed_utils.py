"""Collectives on Python objects, and errors that stop every rank."""

from collections.abc import Callable
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
    result, failure = [], None
    try:
        result.append(function())
    except Exception as error:
        failure = error
    reports = all_gather_objects(
        failure and (isinstance(failure, UserError), f"{type(failure).__name__}: {failure}", str(failure)), group
    )
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            is_user_error, described, message = report
            raise UserError(message) if is_user_error else RuntimeError(f"rank {rank} failed: {described}")
    return result[0]


def on_this_rank(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, which may run collectives, where a plug-in's mistake may be this rank's alone.

    Raises:
        RankError: `function` raised a UserError.
    """
    try:
        return function(*args)
    except UserError as error:
        raise RankError(str(error)) from error
