"""A world of any number of ranks in one process: each runs until a collective waits for others, and later once more.

A rank that reaches a collective which others have not joined leaves what it brings and starts over later, when it
finds the total there. So any sequence of collectives works, each depending on the results of those before it, and the
world holds one running total for each instead of what every rank brought.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state

Rank = tuple[int, int]
"""Data-parallel and context-parallel rank."""


class WaitingError(BaseException):
    """The rank has to wait; no handler of errors is to catch it."""


@dataclass
class Meeting:
    """One collective of one group."""

    total: torch.Tensor | None = None
    present: set[int] = field(default_factory=set)

    def join(self, rank: int, tensor: torch.Tensor, op: Any, copies: int) -> None:
        if rank in self.present:
            return
        self.present.add(rank)
        is_max = op == dist.ReduceOp.MAX
        brought = tensor.clone() if is_max or copies == 1 else tensor * copies
        if self.total is None:
            self.total = brought
        else:
            assert self.total.shape == brought.shape and self.total.dtype == brought.dtype
            self.total = torch.maximum(self.total, brought) if is_max else self.total.add_(brought)


@dataclass
class World:
    """`dp_size * cp_size` ranks.

    Attributes:
        copies: How many identical worlds stand behind this one: each sum over data-parallel ranks is so many times
            what its ranks bring, so that few ranks can add up to counts of very many.
        payload: Bytes that a rank brings to each collective, by the axis and the collective's turn on it.
    """

    dp_size: int
    cp_size: int
    copies: int = 1
    payload: dict[tuple[str, int], int] = field(default_factory=dict)
    _meetings: dict[tuple, Meeting] = field(default_factory=dict)
    _turns: dict[str, int] = field(default_factory=dict)

    def ranks(self) -> list[Rank]:
        return [(dp, cp) for dp in range(self.dp_size) for cp in range(self.cp_size)]

    def enter(self, rank: Rank) -> None:
        """Become a rank, at its start."""
        dp, cp = rank
        self._turns = {}
        set_parallel_state(
            ParallelState(
                intra_dp=MeetingAxis(dp, self.dp_size * self.copies, world=self, name="dp", peers=cp),
                intra_dp_cp=MeetingAxis(
                    dp * self.cp_size + cp, self.dp_size * self.cp_size * self.copies, world=self, name="dp_cp"
                ),
                cp=MeetingAxis(cp, self.cp_size, world=self, name="cp", peers=dp),
            )
        )

    def run(self, function: Callable[[Rank], Any]) -> dict[Rank, Any]:
        """Return what `function(rank)` returns on each rank; it may meet others, and starts over when it has to wait.

        Collectives count from here on.
        """
        self._meetings, self.payload = {}, {}
        results: dict[Rank, Any] = {}
        while len(results) < self.dp_size * self.cp_size:
            for rank in self.ranks():
                if rank in results:
                    continue
                self.enter(rank)
                with suppress(WaitingError):
                    results[rank] = function(rank)
        return results

    def meet(self, axis: MeetingAxis, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        turn = self._turns.get(axis.name, 0)
        self._turns[axis.name] = turn + 1
        meeting = self._meetings.setdefault((axis.name, axis.peers, turn), Meeting())
        copies = 1 if axis.name == "cp" else self.copies
        meeting.join(axis.rank, tensor, op, copies)
        self.payload[axis.name, turn] = max(self.payload.get((axis.name, turn), 0), tensor.nbytes)
        if len(meeting.present) * copies < axis.size:
            raise WaitingError
        return meeting.total.clone()


@dataclass(frozen=True)
class MeetingAxis(GroupInfo):
    """An axis whose collectives are the world's meetings."""

    world: World | None = None
    name: str = ""
    peers: int = 0

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        return self.world.meet(self, tensor, op)
