"""The records that travel from rollout to training."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

RolloutBatch = dict[str, Any]
"""Columns by name. Every list-valued column has one entry per row (one training sample each); the few columns of one
optimizer step or one shard are named in `SHARD_COLUMNS`."""

SHARD_COLUMNS = ("step_row_counts",)
"""Columns of a shard that do not hold one entry per row: `step_row_counts` holds the number of this shard's rows in
each optimizer step, in order."""


@dataclasses.dataclass
class Sample:
    """One training row: a prompt, one response, and what rollout learned about it.

    Token-level lists (`loss_mask`, `rollout_log_probs`, `loss_weights`) cover the response only, so their length is
    `response_length`; `tokens` is prompt + response. Field names are the host trainer's, so its dumps read unchanged.

    Attributes:
        group_index: Which prompt group the row belongs to; rows of one prompt share it.
        index: Position of the row in the run's stream of rows.
        rollout_id: Which rollout the row is a part of, where one rollout is stored as several rows; None means that
            the row is a rollout of its own. The rows of a rollout share `group_index` and reward.
        reward: Scalar reward, or a mapping of named rewards from which `--reward-key` picks.
        loss_mask: 0/1 per response token; None means all ones.
        rollout_log_probs: Log-probability (nats) of each response token under the policy that sampled it.
        remove_sample: Keep the row in every count of samples, but mask all of its tokens.
        train_metadata: Free-form data for custom loss functions.
        loss_weights: How much each response token weighs in the loss, beside the mask: finite, at least 0; None means
            all ones. A mean of the loss is the weighted mean (`--loss-weight-normalization`); metrics are not
            weighted.
    """

    class Status(Enum):
        """How generation ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    loss_weights: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the plain-data form that a rollout dump stores (extra attributes included)."""
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """Rebuild a sample from `to_dict`'s form; unknown keys become attributes, so that nothing is lost.

        Raises:
            ValueError: `status` is not one of `Sample.Status`.
        """
        known = {field.name for field in dataclasses.fields(Sample)}
        values = {**data, "status": Sample.Status(data.get("status", Sample.Status.PENDING.value))}
        sample = Sample(**{key: value for key, value in values.items() if key in known})
        # Not setattr, which refuses the name of a property.
        vars(sample).update({key: values[key] for key in values.keys() - known})
        return sample

    def get_reward_value(self, args: Any) -> float:
        """Return the scalar reward that training uses: `reward`, or `reward[args.reward_key]` where a key is set."""
        key = getattr(args, "reward_key", None)
        reward: Any = self.reward  # conversion checks that it is a mapping where a key is set, and a number in the end
        return reward[key] if key else reward

    @property
    def effective_response_length(self) -> int:
        """Number of active response tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)
