"""Where the metrics of a run go beside `metrics.jsonl`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.run_files import arguments_as_json
from miles.utils.tracking.metrics_log import MetricsLog
from miles.utils.tracking.tensorboard_tracker import TensorBoardTracker
from miles.utils.tracking.wandb_tracker import WandbTracker

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Shows the metrics of a run in some tool.

    Attributes:
        location: Where a person finds them there: a command, an address.
    """

    location: str

    def write(self, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one optimizer step, `train/step` among them."""

    def close(self, *, exit_code: int) -> None:
        """End, with the run's exit status: 0 where it ended well."""


class Trackers:
    """All of a run's trackers. One that fails is left out from there on: it must not end the run, nor the others."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        """Take over open trackers.

        Args:
            trackers: By name.
        """
        self._trackers = dict(trackers)

    def locations(self) -> Iterator[str]:
        """Yield a line for each tracker that works: its name, and where a person finds it."""
        return (f"{name}: {tracker.location}" for name, tracker in self._trackers.items())

    def write(self, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of one optimizer step to each."""
        self._on_each(lambda tracker: tracker.write(metrics))

    def close(self, *, exit_code: int) -> None:
        """Close each."""
        self._on_each(lambda tracker: tracker.close(exit_code=exit_code))

    def _on_each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a full disk, a service that has died: whatever the tool raises
                del self._trackers[name]
                logger.warning(
                    "--tracking %s failed; training goes on without it, and metrics.jsonl has every step: %s",
                    name,
                    _in_one_line(error),
                )


def open_trackers(args: Options, metrics: MetricsLog) -> Trackers:
    """Open what `--tracking` names.

    Args:
        args: The resolved arguments.
        metrics: The run's metrics: what a resumed run has kept of its earlier parts decides what a tool may show of
            them. Each tool's files are beside its file.

    Raises:
        UserError: a tool does not start: it cannot write, has no API key, does not reach its server.
    """
    directory, arguments = metrics.path.parent, arguments_as_json(args)
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(directory, arguments, earlier=metrics.records),
        "wandb": lambda: WandbTracker(args, directory, arguments, earlier=metrics.records),
    }
    return Trackers({name: _open(name, openers[name]) for name in args.tracking if name in openers})


def _open(name: str, opener: Callable[[], Tracker]) -> Tracker:
    try:
        tracker = opener()
    except Exception as error:  # as above
        hint = "; --wandb-mode offline needs neither account nor network" if name == "wandb" else ""
        raise UserError(
            f"--tracking {name} does not start: {_in_one_line(error)}; fix that, or leave it out{hint}"
        ) from error
    logger.info("%s: %s", name, tracker.location)
    return tracker


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
