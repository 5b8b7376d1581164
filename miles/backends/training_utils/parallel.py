"""Who this process is: one `GroupInfo` per named parallel axis, and the factor by which each backend averages.

Read at the seams (`loss_function`, logging, data scheduling) and handed on as numbers; the math of
`loss_aggregation.py` never asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class GroupInfo:
    """One parallel axis as seen from this rank.

    Attributes:
        rank: This process's position on the axis, `0 <= rank < size`.
        size: Number of processes on the axis.
        group: The process group, None where the axis is not backed by one (size 1, or a simulated rank).
        gloo_group: A CPU group over the same ranks, for object collectives.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    gloo_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, size), got rank={self.rank} size={self.size}")

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return `tensor` reduced over the axis; it may be reduced in place.

        An axis of one process, or without a group (a simulated rank), returns it as it is. A CPU tensor goes through
        the accelerator where the group needs that: a rank without rows has nothing on a device.
        """
        if self.group is None or self.size == 1:
            return tensor
        if dist.get_backend(self.group) == "nccl":
            tensor = tensor.cuda()
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


SINGLE = GroupInfo(rank=0, size=1)
"""An axis with one process on it."""


@dataclass(frozen=True)
class ParallelState:
    """Named axes of one process. Field names and order are the host's.

    Attributes:
        intra_dp: Data parallel.
        intra_dp_cp: Data parallel x context parallel: the ranks over which a step's counts and metrics are summed.
        cp: Context parallel (zigzag slices of one sequence).
        tp: Tensor parallel.
        pp: Pipeline parallel.
        ep: Expert parallel.
        etp: Expert tensor parallel.
        indep_dp: Independent data-parallel cells of the host's fault-tolerant mode.
        cp_comm_type: How attention exchanges keys and values over `cp`, in Megatron-Core's words; one, or one for each
            layer. "a2a" (Ulysses) slices sequences otherwise and is refused.
        is_pp_last_stage: Whether this rank computes the loss.
        vpp_size: Virtual pipeline stages on this rank.
        microbatch_group_size_per_vp_stage: Micro-batches in flight per virtual stage.
    """

    intra_dp: GroupInfo = SINGLE
    intra_dp_cp: GroupInfo = SINGLE
    cp: GroupInfo = SINGLE
    tp: GroupInfo = SINGLE
    pp: GroupInfo = SINGLE
    ep: GroupInfo = SINGLE
    etp: GroupInfo = SINGLE
    indep_dp: GroupInfo = SINGLE
    cp_comm_type: str | Sequence[str] | None = None
    is_pp_last_stage: bool = True
    vpp_size: int | None = 1
    microbatch_group_size_per_vp_stage: int | None = None

    def __post_init__(self) -> None:
        kinds = [self.cp_comm_type] if isinstance(self.cp_comm_type, str) else list(self.cp_comm_type or ())
        if self.cp.size > 1 and "a2a" in kinds:
            raise ValueError(
                f"cp_comm_type 'a2a' gives each of {self.cp.size} context-parallel ranks one contiguous slice, and "
                "losses here are computed on zigzag slices; use 'p2p' or 'all_gather'"
            )


_parallel_state: ParallelState | None = None


def set_parallel_state(state: ParallelState) -> None:
    """Install this process's topology; backends call it once after their groups exist."""
    global _parallel_state
    _parallel_state = state


def get_parallel_state() -> ParallelState:
    """Return the installed topology; that of a single process where none is installed and no others are there.

    Raises:
        RuntimeError: this is one of several processes, and `set_parallel_state` has not run in it.
    """
    if _parallel_state is not None:
        return _parallel_state
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"no parallel state in this process, one of {dist.get_world_size()}; call "
            "set_parallel_state(ParallelState(...)) first"
        )
    return ParallelState()
