"""How runs ended, in numbers: one line a group, the metrics of the picture."""

from collections.abc import Sequence

import numpy as np

from miles.tools.plot_run.figure import PANELS
from miles.tools.plot_run.runs import RunGroup
from miles.utils.run_summary import NUM_COMPARED_STEPS
from miles.utils.tracking import STEP_KEY

GAP = "  "


def final_values(group: RunGroup, key: str) -> np.ndarray:
    """Return each run's mean over the last `NUM_COMPARED_STEPS` steps that logged `key` as a finite number.

    Returns:
        [R] float64, for the R runs of the group that have such a step.
    """
    finite = (values[np.isfinite(values)] for _, values in (run.series(key) for run in group.runs))
    return np.array([values[-NUM_COMPARED_STEPS:].mean() for values in finite if len(values)], dtype=np.float64)


def describe_groups(groups: Sequence[RunGroup]) -> str:
    """Return a table for people: mean over a group's runs, and their standard deviation (of R - 1) where R > 1."""
    head = ["", "runs", "last step", *(panel.title.lower() for panel in PANELS)]
    rows = [
        [group.label, str(len(group.runs)), _last_steps(group), *(_cell(group, panel.key) for panel in PANELS)]
        for group in groups
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_join(cells, widths) for cells in (head, *rows)]
    note = f"mean over each run's last {NUM_COMPARED_STEPS} steps"
    spread = "; ±: standard deviation over runs" if any(len(group.runs) > 1 for group in groups) else ""
    return "\n".join([*lines, note + spread])


def _last_steps(group: RunGroup) -> str:
    steps = sorted({run.records[-1][STEP_KEY] for run in group.runs})
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _cell(group: RunGroup, key: str) -> str:
    values = final_values(group, key)
    if not len(values):
        return "-"
    spread = f" ± {values.std(ddof=1):.2g}" if len(values) > 1 else ""
    return f"{values.mean():.4g}{spread}"


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return GAP.join([cells[0].ljust(widths[0]), *aligned])
