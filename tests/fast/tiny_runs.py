"""A run that takes a second, what it leaves, and how it is killed."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.trainer import main

# The entropy term keeps every gradient away from zero, whatever the rewards.
TINY = [
    *("--hidden-size=8", "--num-layers=1", "--num-attention-heads=1", "--max-position-embeddings=32"),
    *("--num-rollout=6", "--rollout-batch-size=2", "--n-samples-per-prompt=2", "--num-steps-per-rollout=2"),
    *("--rollout-max-response-len=4", "--micro-batch-size=4", "--lr=0.01", "--entropy-coef=0.05"),
]


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def main_killed_in_rollout(rollout_id: int, command: Sequence[str]) -> int:
    """Train, and die by SIGKILL after the first step of a rollout is on disk."""
    from miles.utils.run_recorder import RunRecorder

    record = RunRecorder.record

    def record_and_die(self, current, metrics):
        record(self, current, metrics)
        if current == rollout_id:
            os.kill(os.getpid(), signal.SIGKILL)

    RunRecorder.record = record_and_die
    return main(command)
