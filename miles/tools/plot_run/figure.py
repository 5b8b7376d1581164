"""The picture of runs side by side: one panel a metric, one colour a group of runs.

Shapes: R runs of a group, K steps that a run logged, S steps that all runs of a group logged.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from miles.tools.figure_style import (
    MODE_STYLES,
    OTHER_STYLES,
    REFERENCE_COLOUR,
    Style,
    figure_style,
    label_in_plain_numbers,
    new_figure,
)
from miles.tools.plot_run.runs import RunGroup
from miles.utils.tracking import LOSS_KEY, REWARD_KEY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTH_KEY = "rollout/response_lengths"
GRADIENT_NORM_KEY = "train/grad_norm"
WIDTH, HEIGHT, ROW_HEIGHT = 10.0, 6.4, 0.22
"""Inches: of the figure, and what a row of the legend adds to its height."""
LEGEND_CHARACTERS = 112
"""About as many fit beside each other in the legend."""
ENTRY_CHARACTERS = 10
"""What a legend's line and gap take of them."""


@dataclass(frozen=True)
class Panel:
    """One metric.

    Attributes:
        key: Its name in `metrics.jsonl`.
        title: Its name for people.
        unit: What the axis counts.
        scale: Of the axis; "log" falls back to "linear" where a value is not positive.
    """

    key: str
    title: str
    unit: str
    scale: str = "linear"


PANELS = (
    Panel(REWARD_KEY, "Reward", "mean over the rollout"),
    Panel(LENGTH_KEY, "Response length", "tokens"),
    Panel(LOSS_KEY, "Loss", "value of the step"),
    Panel(GRADIENT_NORM_KEY, "Gradient norm", "L2, before clipping", "log"),
)


@dataclass(frozen=True)
class GroupSeries:
    """A metric of a group of runs.

    Attributes:
        runs: (steps, values) of each of the R runs, [K] int64 and [K] float64, NaN where a value is not finite.
        steps: [S] int64 steps at which every run has a finite value.
        values: [R, S] float64 the runs' values there.
    """

    runs: Sequence[tuple[np.ndarray, np.ndarray]]
    steps: np.ndarray
    values: np.ndarray


def running_mean(values: np.ndarray, size: int) -> np.ndarray:
    """Return the mean of each value and the finite ones among the `size - 1` before it; NaN where it is not finite.

    Args:
        values: [K] float64.
        size: Values in a mean, at least 1.

    Returns:
        [K] float64.
    """
    finite = np.isfinite(values)
    sums, counts = (_window_sums(each, size) for each in (np.where(finite, values, 0.0), finite.astype(np.float64)))
    return np.where(finite, sums / np.maximum(counts, 1.0), np.nan)


def _window_sums(values: np.ndarray, size: int) -> np.ndarray:
    # Each window is summed for itself: differences of running totals would lose what follows one huge value.
    size = max(min(size, len(values)), 1)
    padded = np.concatenate((np.zeros(size), values))
    return np.lib.stride_tricks.sliding_window_view(padded, size).sum(axis=-1)[1:]


def group_series(group: RunGroup, key: str, *, smooth: int = 1) -> GroupSeries:
    """Return a metric of the group's runs, each smoothed by `running_mean`."""
    runs = [(steps, running_mean(values, smooth)) for steps, values in (run.series(key) for run in group.runs)]
    shared = reduce(np.intersect1d, (steps[np.isfinite(values)] for steps, values in runs))
    return GroupSeries(runs, shared, np.stack([values[np.isin(steps, shared)] for steps, values in runs]))


def group_styles(groups: Sequence[RunGroup]) -> list[Style]:
    """Return a style for each group: the mode's where modes differ, with other dashes for further groups of a mode."""
    modes = [group.mode for group in groups]
    if len(groups) > len(set(modes)) == 1:
        return [OTHER_STYLES[place % len(OTHER_STYLES)] for place in range(len(groups))]
    return [_nth_style(mode, modes[:place].count(mode)) for place, mode in enumerate(modes)]


def _nth_style(mode: str | None, number: int) -> Style:
    style = MODE_STYLES.get(mode, OTHER_STYLES[len(MODE_STYLES)])  # of runs whose mode is not known, no mode's colour
    dashes = [style.dashes, *(other.dashes for other in OTHER_STYLES if other.dashes != style.dashes)]
    return replace(style, dashes=dashes[number % len(dashes)])


def draw_runs(groups: Sequence[RunGroup], *, smooth: int = 1) -> Figure:
    """Draw the metrics of `PANELS`: a thin line a run, a bold mean and a band from the least to the largest a group.

    Args:
        groups: At least one.
        smooth: Steps in the running mean, 1 for none.

    Raises:
        UserError: matplotlib is not installed, or the groups are too many for one figure.
    """
    labels = [textwrap.fill(group.label, LEGEND_CHARACTERS - ENTRY_CHARACTERS) for group in groups]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = min(len(groups), max(LEGEND_CHARACTERS // (longest + ENTRY_CHARACTERS), 1))
    num_lines = -(-len(groups) // columns) * max(label.count("\n") + 1 for label in labels)
    styles = group_styles(groups)
    with figure_style():
        figure = new_figure(WIDTH, HEIGHT + ROW_HEIGHT * num_lines)
        for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            _draw_panel(axes, panel, groups, styles, smooth)
        handles = [_legend_line(style, label) for style, label in zip(styles, labels, strict=True)]
        figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=3.2)
        figure.supxlabel(_caption(groups, smooth), fontsize="medium")
    return figure


def _draw_panel(axes: Axes, panel: Panel, groups: Sequence[RunGroup], styles: Sequence[Style], smooth: int) -> None:
    all_series = [group_series(group, panel.key, smooth=smooth) for group in groups]
    for series, style in zip(all_series, styles, strict=True):
        _draw_series(axes, series, style)
    values = np.concatenate([values for series in all_series for _, values in series.runs])
    values = values[np.isfinite(values)]
    if not len(values):
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=REFERENCE_COLOUR)
    scale = panel.scale if len(values) and values.min() > 0 else "linear"
    axes.set(title=panel.title, ylabel=panel.unit, yscale=scale)
    if scale == "log":
        label_in_plain_numbers(axes.yaxis)


def _draw_series(axes: Axes, series: GroupSeries, style: Style) -> None:
    if len(series.runs) == 1:
        [(steps, values)] = series.runs
        axes.plot(steps, values, color=style.colour, linestyle=style.dashes)
        return
    for steps, values in series.runs:
        axes.plot(steps, values, color=style.colour, linewidth=0.6, alpha=0.45)
    low, high = series.values.min(axis=0), series.values.max(axis=0)
    axes.fill_between(series.steps, low, high, color=style.colour, alpha=0.12, linewidth=0)
    axes.plot(series.steps, series.values.mean(axis=0), color=style.colour, linestyle=style.dashes)


def _legend_line(style: Style, label: str) -> object:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=style.colour, linestyle=style.dashes, label=label)


def _caption(groups: Sequence[RunGroup], smooth: int) -> str:
    sizes = {len(group.runs) for group in groups}
    notes = [f"running mean over {smooth} steps"] if smooth > 1 else []
    if max(sizes) > 1:
        count = f"{max(sizes)} runs" if len(sizes) == 1 else "runs"
        notes.append(f"bold: mean of {count}; thin: each of them; band: their range")
    return "\n".join(filter(None, ["optimizer step", "; ".join(notes)]))
