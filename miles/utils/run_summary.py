"""The closing summary of a run, for people."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from miles.utils.run_files import ARGUMENTS_NAME, LOG_NAME, METRICS_NAME
from miles.utils.tracking import REWARD_KEY, TOKENS_KEY, MetricsLog, is_skipped

NUM_COMPARED_STEPS = 10
"""Steps at each end of a run over which the summary averages the reward."""


def describe_run(
    metrics: MetricsLog,
    *,
    num_rollouts: int,
    num_planned: int,
    seconds: float,
    checkpoint: Path | None,
    trackers: Iterable[str] = (),
) -> str:
    """Return the closing summary.

    Args:
        metrics: The run's metrics.
        num_rollouts: Rollouts trained so far, those before a resumption included.
        num_planned: `--num-rollout`.
        seconds: Wall-clock time of this process.
        checkpoint: The newest checkpoint, if any.
        trackers: A line for each place where the metrics are as well.
    """
    records = metrics.records
    state = "finished" if num_rollouts >= num_planned else "stopped"
    rollouts = f"{num_rollouts} of {num_planned} rollouts"
    if num_rollouts > num_planned:  # those of a run that was resumed where no rollout was left to train
        rollouts = f"{num_rollouts} rollouts, more than --num-rollout {num_planned}"
    tokens = sum(record.get(TOKENS_KEY) or 0 for record in records if not is_skipped(record))
    num_skipped = sum(map(is_skipped, records))
    skipped = f" ({num_skipped} more skipped)" if num_skipped else ""
    lines = [
        f"{state}: {rollouts}, {len(records) - num_skipped} optimizer steps{skipped}, "
        f"{tokens:,} response tokens trained on, {seconds:.1f} s"
    ]
    rewards = [record[REWARD_KEY] for record in records if record.get(REWARD_KEY) is not None]
    if rewards:
        count = min(NUM_COMPARED_STEPS, len(rewards))
        lines.append(
            f"reward: {_mean(rewards[:count]):.3f} over the first {count} steps, "
            f"{_mean(rewards[-count:]):.3f} over the last {count}"
        )
    lines.append(f"metrics, arguments and log: {metrics.path.parent}/{{{METRICS_NAME},{ARGUMENTS_NAME},{LOG_NAME}}}")
    lines.extend(trackers)
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint}")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
