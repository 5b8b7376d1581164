"""The metrics of a run, step by step: `metrics.jsonl` always, TensorBoard and W&B where they are asked for.

Importing this package needs neither torch nor the tools.
"""

from miles.utils.tracking.keys import LOSS_KEY, REWARD_KEY, ROLLOUT_KEY, SKIPPED_KEY, STEP_KEY, TOKENS_KEY, is_skipped
from miles.utils.tracking.metrics_log import MetricsLog
from miles.utils.tracking.trackers import Tracker, Trackers, open_trackers

__all__ = [
    "LOSS_KEY",
    "REWARD_KEY",
    "ROLLOUT_KEY",
    "SKIPPED_KEY",
    "STEP_KEY",
    "TOKENS_KEY",
    "MetricsLog",
    "Tracker",
    "Trackers",
    "is_skipped",
    "open_trackers",
]
