"""What a rollout is made of."""

from dataclasses import dataclass
from typing import Any

RolloutBatch = dict[str, Any]


@dataclass
class Sample:
    """One row of an answer to a prompt; several rows may share a rollout."""

    index: int
    group_index: int | None
    tokens: list[int]
    response_length: int
    reward: float
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_id: int | None = None
    remove_sample: bool = False
