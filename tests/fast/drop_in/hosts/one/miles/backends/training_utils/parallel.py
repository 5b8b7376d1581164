"""Who this process is."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GroupInfo:
    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def groups_inner_to_outer(self):
        return [self.group] if self.size > 1 else []


@dataclass(frozen=True)
class ParallelState:
    intra_dp: GroupInfo = field(default_factory=GroupInfo)
    intra_dp_cp: GroupInfo = field(default_factory=GroupInfo)
    cp: GroupInfo = field(default_factory=GroupInfo)
    tp: GroupInfo = field(default_factory=GroupInfo)
    is_pp_last_stage: bool = True

    @property
    def effective_dp(self):
        return self.intra_dp

    @property
    def effective_dp_cp(self):
        return self.intra_dp_cp


_state = ParallelState()


def get_parallel_state():
    return _state


def set_parallel_state(state):
    global _state
    _state = state
