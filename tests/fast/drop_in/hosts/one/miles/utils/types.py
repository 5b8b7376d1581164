"""What a rollout is made of."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

RolloutBatch = dict[str, Any]


@dataclass
class Sample:
    """One answer to a prompt."""

    class Status(Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    index: int
    group_index: int | None
    tokens: list[int]
    response_length: int
    reward: float
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.COMPLETED
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
