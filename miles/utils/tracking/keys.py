"""Keys of a step's metrics that the package reads back, and what they say of the step."""

from collections.abc import Mapping
from typing import Any

STEP_KEY = "train/step"
"""The optimizer step's number, over the whole run: the x axis of every tracker."""
ROLLOUT_KEY = "rollout/step"
"""Key of the rollout's number in each line of metrics."""
REWARD_KEY = "rollout/raw_reward"
TOKENS_KEY = "train/num_tokens"
LOSS_KEY = "train/loss"
SKIPPED_KEY = "train/skipped_steps"
"""Steps skipped so far, in the metrics of a skipped step, which have no loss."""


def is_skipped(metrics: Mapping[str, Any]) -> bool:
    """Whether the metrics are those of a step that was skipped, since nothing of it was left to train on."""
    return SKIPPED_KEY in metrics and LOSS_KEY not in metrics
