"""What a person sees of a run: a progress bar while it works, a line of metrics a step, a summary at the end."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from miles.utils.options import Options
from miles.utils.run_files import METRICS_NAME
from miles.utils.run_summary import describe_run
from miles.utils.tracking import LOSS_KEY, REWARD_KEY, ROLLOUT_KEY, STEP_KEY, MetricsLog, is_skipped, open_trackers

REFRESH_SECONDS = 0.2

logger = logging.getLogger(__name__)


class SilentRecorder:
    """Records nothing: for the processes that do not talk to a person. A context manager, as is `RunRecorder`."""

    def __enter__(self) -> "SilentRecorder":
        return self

    def __exit__(self, *exception: object) -> None:
        """Close what is open."""

    def report(self, phase: str) -> None:
        """Show what is being done."""

    def start_rollout(self) -> None:
        """Note that sampling begins."""

    def start_training(self) -> None:
        """Note that training on the rollout begins."""

    def record(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one optimizer step."""

    def end_rollout(self, rollout_id: int, checkpoint: Path | None) -> None:
        """Note that a rollout is done, and the checkpoint written after it, if any."""


class RunRecorder(SilentRecorder):
    """Writes `metrics.jsonl`, tells the trackers, drives the progress bar and prints the closing summary."""

    def __init__(self, args: Options, directory: Path, *, first_rollout_id: int, started: float) -> None:
        """Open the metrics of a run, and its trackers.

        Args:
            args: Reads num_rollout and num_steps_per_rollout, how many steps a rollout is expected to have (with
                `--prompt-groups ragged` it may have others); see also `open_trackers`.
            directory: The run's folder.
            first_rollout_id: The rollout to be trained next.
            started: `time.monotonic()` at the start of the run.

        Raises:
            UserError: the metrics cannot be written, or a tracker does not start.
        """
        self._args = args
        self._metrics = MetricsLog(directory / METRICS_NAME, first_rollout_id=first_rollout_id)
        self._trackers = open_trackers(args, self._metrics)
        self._num_rollouts = first_rollout_id
        self._checkpoint: Path | None = None
        self._started = self._last_mark = self._last_refresh = started
        self._rollout_seconds = 0.0
        self._has_recorded = False

    def __enter__(self) -> "RunRecorder":
        steps = self._args.num_steps_per_rollout
        self._redirect = logging_redirect_tqdm([logging.getLogger("miles")])
        self._redirect.__enter__()
        self._bar = tqdm(
            total=self._args.num_rollout * steps,
            initial=self._num_rollouts * steps,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
            disable=None,  # on a terminal only; a file gets the log's line a step
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
        self._redirect.__exit__(None, None, None)
        self._metrics.close()
        if exception[0] is None or self._has_recorded:  # else the error is all there is to tell
            self._print_summary()
        self._trackers.close(exit_code=0 if exception[0] is None else 1)

    def _print_summary(self) -> None:
        print(
            describe_run(
                self._metrics,
                num_rollouts=self._num_rollouts,
                num_planned=self._args.num_rollout,
                seconds=time.monotonic() - self._started,
                checkpoint=self._checkpoint,
                trackers=self._trackers.locations(),
            ),
            flush=True,
        )

    def report(self, phase: str) -> None:
        """Show `phase` beside the bar."""
        now = time.monotonic()
        self._bar.set_description_str(phase, refresh=now - self._last_refresh > REFRESH_SECONDS)
        self._last_refresh = now if now - self._last_refresh > REFRESH_SECONDS else self._last_refresh

    def start_rollout(self) -> None:
        """Start the clock of the rollout."""
        self._last_mark = time.monotonic()

    def start_training(self) -> None:
        """Stop the clock of the rollout and start that of its first step."""
        self._rollout_seconds = self._lap()

    def record(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics, with the seconds that the rollout and the step took, and tell the trackers."""
        self._has_recorded = True
        line = {
            **metrics,
            ROLLOUT_KEY: rollout_id,
            "perf/rollout_time": self._rollout_seconds,
            "perf/step_time": self._lap(),
        }
        self._metrics.write(line)
        self._trackers.write(line)
        skipped = "skipped, nothing was left to train on; " if is_skipped(metrics) else ""
        logger.info("step %d: %s%s", metrics[STEP_KEY], skipped, " ".join(_shown(metrics)))
        shown = {"loss": metrics.get(LOSS_KEY), "reward": metrics.get(REWARD_KEY)}
        self._bar.set_postfix(
            {name: f"{value:.3f}" for name, value in shown.items() if value is not None}, refresh=False
        )
        self._bar.total = max(self._bar.total or 0, self._bar.n + 1)
        self._bar.update()

    def end_rollout(self, rollout_id: int, checkpoint: Path | None) -> None:
        """Count the rollout as done, and expect the steps of those that are left."""
        self._num_rollouts = rollout_id + 1
        num_left = self._args.num_rollout - self._num_rollouts
        self._bar.total = self._bar.n + num_left * self._args.num_steps_per_rollout
        self._bar.refresh()
        self._checkpoint = checkpoint or self._checkpoint

    def _lap(self) -> float:
        now = time.monotonic()
        seconds, self._last_mark = now - self._last_mark, now
        return seconds


def _shown(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield what a line of the log tells of a step: the reward, then everything about training, to four digits."""
    for key, value in sorted(metrics.items(), key=lambda item: item[0] != REWARD_KEY):
        if key == REWARD_KEY or (key.startswith("train/") and key != STEP_KEY):
            yield f"{key.rpartition('/')[2]}={value:.4g}"
