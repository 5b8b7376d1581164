"""Metrics for TensorBoard (extra `tensorboard`)."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from miles.utils.tracking.keys import STEP_KEY

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes each key as a scalar over `train/step`, and the arguments as a text, to event files.

    Attributes:
        location: How a person looks at the files.
    """

    def __init__(self, directory: Path, arguments: str, *, first_step: int) -> None:
        """Open a new event file.

        Args:
            directory: The run's folder; event files are in `tensorboard/`.
            arguments: The run's arguments as JSON.
            first_step: The optimizer step that comes next. The file starts with a mark that makes TensorBoard drop
                what older files hold from there on (`purge_step`).
        """
        from torch.utils.tensorboard import SummaryWriter  # here, not at the top: it needs torch

        folder = directory / FOLDER
        self.location = f"tensorboard --logdir {folder}"
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        self._writer.add_text("arguments", textwrap.indent(arguments, "    "), first_step)  # Markdown's code block
        self._writer.flush()

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write one step. It is on disk on return: what a killed run left in memory would be missing after a resume.

        Raises:
            OSError: it cannot be written.
        """
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, metrics[STEP_KEY])
        self._writer.flush()

    def close(self, *, exit_code: int) -> None:
        """Close the file; event files have no place for `exit_code`."""
        self._writer.close()
