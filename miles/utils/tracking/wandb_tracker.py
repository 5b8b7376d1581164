"""Metrics for Weights & Biases (extra `wandb`)."""

import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.utils.misc import write_whole
from miles.utils.options import Options
from miles.utils.tracking.keys import STEP_KEY

FOLDER = "wandb"
RUN_ID_NAME = "run-id.txt"
DEFAULT_PROJECT = "miles"
FINISH_SECONDS = 60.0
"""How long the end of a run waits for an upload; `wandb sync` uploads what is left then."""

logger = logging.getLogger(__name__)


class WandbTracker:
    """Logs each step to one W&B run, which a resumed run continues.

    W&B takes no step whose number it is past. So a resumed run leaves those out, and logs again those of its earlier
    steps that a killed process took with it.

    Attributes:
        location: Where a person finds the run.
    """

    def __init__(
        self, args: Options, directory: Path, arguments: str, *, earlier: Sequence[Mapping[str, Any]]
    ) -> None:
        """Start or continue the W&B run.

        Args:
            args: Reads the `--wandb-...` options; the API key comes from `wandb login` or WANDB_API_KEY.
            directory: The run's folder; W&B's files are in `wandb/`.
            arguments: The run's arguments as JSON, the W&B run's config.
            earlier: The steps before this part of the run; without any, a new W&B run is made.
        """
        import wandb

        mode: Any = args.wandb_mode or os.environ.get("WANDB_MODE")
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder.resolve() / "cache"))  # W&B's service keeps its log there
        self._run = wandb.init(
            project=args.wandb_project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            entity=args.wandb_team,
            group=args.wandb_group,
            name=directory.name,
            id=_keep_run_id(folder / RUN_ID_NAME, given=args.wandb_run_id, is_new=not earlier),
            resume=None if mode == "offline" else "allow",  # nothing to ask offline, and some releases warn of it
            mode=mode,
            dir=str(directory),
            config=json.loads(arguments),
            # Neither banners nor a copy of the console: both break the progress bar.
            settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_SECONDS),
        )
        self._run.define_metric(STEP_KEY)
        self._run.define_metric("*", step_metric=STEP_KEY)
        self.location = _describe(self._run)
        self._first_step = self._run.starting_step  # 0, or that after the last one which W&B has of the run
        if self._first_step > (earlier[-1][STEP_KEY] + 1 if earlier else 0):
            logger.warning("W&B has steps of this run up to %d, and takes none of those again", self._first_step - 1)
        for record in earlier:
            self.write({key: value for key, value in record.items() if value is not None})  # null stood for NaN

    def write(self, metrics: Mapping[str, float]) -> None:
        """Log one step, unless W&B has it."""
        if metrics[STEP_KEY] >= self._first_step:
            self._run.log(dict(metrics), step=int(metrics[STEP_KEY]), commit=True)

    def close(self, *, exit_code: int) -> None:
        """End the W&B run: finished where `exit_code` is 0, else failed."""
        self._run.finish(exit_code=exit_code)


def _keep_run_id(path: Path, *, given: str | None, is_new: bool) -> str:
    """Return the id given, else the one kept in `path` unless a new run is wanted, else a new one; keep it there."""
    kept = path.read_text().strip() if path.exists() and not is_new else None
    run_id = given or kept or secrets.token_hex(4)
    write_whole(path, f"{run_id}\n".encode())
    return run_id


def _describe(run: Any) -> str:
    if run.disabled:
        return "disabled, nothing is kept"
    return f"wandb sync {Path(run.dir).parent}" if run.offline else run.url
