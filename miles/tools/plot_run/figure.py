"""The picture of runs side by side: one panel a metric, one colour a group of runs.

Shapes: R runs of a group, K steps of a run, S points of a group.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.tools.figure_style import (
    REFERENCE_COLOUR,
    Style,
    figure_style,
    label_in_plain_numbers,
    new_figure,
    require_matplotlib,
)
from miles.tools.plot_run.runs import RunGroup, escape
from miles.tools.plot_run.styles import group_styles
from miles.utils.tracking import LOSS_KEY, REWARD_KEY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

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
        steps: [S] int64 steps of any run, and one step in each gap between them, so that no line leads over it.
        values: [R, S] float64 the runs' values there, NaN where a run has none or one that is not finite.
    """

    steps: np.ndarray
    values: np.ndarray


def running_mean(steps: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the mean of each value and the finite ones of the `size - 1` steps before it; NaN where it is not finite.

    Args:
        steps: [K] int64, ascending; those that are not there have no part in any mean.
        values: [K] float64.
        size: Steps in a mean, at least 1.

    Returns:
        [K] float64.
    """
    finite = np.isfinite(values)
    starts = np.searchsorted(steps, steps - min(size, int(steps[-1]) + 1), side="right")
    windows = np.stack([starts, np.arange(1, len(steps) + 1)], axis=1).ravel()
    # Each window is summed for itself: differences of running totals would lose what follows one huge value.
    sums, counts = (
        np.add.reduceat(np.append(each, 0.0), windows)[::2] for each in (np.where(finite, values, 0.0), finite)
    )
    return np.where(finite, sums / np.maximum(counts, 1.0), np.nan)


def group_series(group: RunGroup, key: str, *, smooth: int = 1) -> GroupSeries:
    """Return a metric of the group's runs, each smoothed by `running_mean`."""
    runs = [run.series(key) for run in group.runs]
    steps = reduce(np.union1d, (steps for steps, _ in runs))
    steps = np.union1d(steps, steps[:-1][np.diff(steps) > 1] + 1)
    values = np.full((len(runs), len(steps)), np.nan)
    for row, (own_steps, own_values) in zip(values, runs, strict=True):
        row[np.searchsorted(steps, own_steps)] = running_mean(own_steps, own_values, smooth)
    return GroupSeries(steps, values)


def draw_runs(groups: Sequence[RunGroup], *, smooth: int = 1) -> Figure:
    """Draw the metrics of `PANELS`: a thin line a run, a bold mean and a band from the least to the largest a group.

    Args:
        groups: At least one.
        smooth: Steps in the running mean, 1 for none.

    Raises:
        UserError: matplotlib is not installed, or the groups are too many for one figure.
    """
    styles = group_styles(groups)
    labels = [textwrap.fill(text, LEGEND_CHARACTERS - ENTRY_CHARACTERS) or " " for text in _drawable(groups)]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = min(len(groups), max(LEGEND_CHARACTERS // (longest + ENTRY_CHARACTERS), 1))
    num_lines = -(-len(groups) // columns) * max(label.count("\n") + 1 for label in labels)
    with figure_style():
        figure = new_figure(WIDTH, HEIGHT + ROW_HEIGHT * num_lines)
        for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            _draw_panel(axes, panel, groups, styles, smooth)
        _draw_legend(figure, styles, labels, columns)
        figure.supxlabel(_caption(groups, smooth), fontsize="medium")
    return figure


def _draw_panel(axes: Axes, panel: Panel, groups: Sequence[RunGroup], styles: Sequence[Style], smooth: int) -> None:
    all_series = [group_series(group, panel.key, smooth=smooth) for group in groups]
    for series, style in zip(all_series, styles, strict=True):
        _draw_series(axes, series, style)
    values = np.concatenate([series.values.ravel() for series in all_series])
    values = values[np.isfinite(values)]
    if not len(values):
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=REFERENCE_COLOUR)
    scale = panel.scale if len(values) and values.min() > 0 else "linear"
    axes.set(title=panel.title, ylabel=panel.unit, yscale=scale)
    if scale == "log":
        label_in_plain_numbers(axes.yaxis)


def _draw_series(axes: Axes, series: GroupSeries, style: Style) -> None:
    if len(series.values) > 1:
        for values in series.values:
            _draw_line(axes, series.steps, values, style, linestyle="-", linewidth=0.6, markersize=2.0, alpha=0.45)
        low, high = series.values.min(axis=0), series.values.max(axis=0)  # NaN where a run has none
        axes.fill_between(series.steps, low, high, color=style.colour, alpha=0.12, linewidth=0)
    _draw_line(axes, series.steps, series.values.mean(axis=0), style, linestyle=style.dashes)


def _draw_line(axes: Axes, steps: np.ndarray, values: np.ndarray, style: Style, **look: Any) -> None:
    """Draw a line with gaps where there is no value, and a marker at each point that no line reaches."""
    has_value = np.pad(np.isfinite(values), 1)
    is_alone = has_value[1:-1] & ~has_value[:-2] & ~has_value[2:]
    axes.plot(steps, values, color=style.colour, marker=style.marker, markevery=is_alone, **look)


def _draw_legend(figure: Figure, styles: Sequence[Style], labels: Sequence[str], columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=style.colour, linestyle=style.dashes) for style in styles]
    blank = [" "] * len(labels)
    legend = figure.legend(handles, blank, loc="outside upper center", ncols=columns, handlelength=3.2)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set(text=label, parse_math=False)  # a person's, where "$" and a "_" in front mean nothing


def _drawable(groups: Sequence[RunGroup]) -> list[str]:
    """Return the labels; characters that the figure's font lacks are escaped, which one warning says."""
    require_matplotlib()
    from matplotlib.font_manager import FontProperties, findfont, get_font

    with figure_style():
        characters = get_font(findfont(FontProperties())).get_charmap()
    labels = [escape(group.label, lambda char: ord(char) in characters) for group in groups]
    changed = sum(label != group.label for label, group in zip(labels, groups, strict=True))
    if changed:
        logger.warning(
            "the figure's font lacks characters of %d legend entries; they stand there as \\uXXXX, their numbers in "
            "Unicode",
            changed,
        )
    return labels


def _caption(groups: Sequence[RunGroup], smooth: int) -> str:
    sizes = {len(group.runs) for group in groups}
    notes = [f"running mean over {smooth} steps"] if smooth > 1 else []
    if max(sizes) > 1:
        count = f"{max(sizes)} runs" if len(sizes) == 1 else "runs"
        where = "" if _are_alike(groups) else ", where each has a value"
        notes.append(f"bold: mean of {count}{where}; thin: each of them; band: their range")
    return "\n".join(filter(None, ["optimizer step", "; ".join(notes)]))


def _are_alike(groups: Sequence[RunGroup]) -> bool:
    """Whether in each group and panel all runs have their values at the same steps."""
    has_value = (np.isfinite(group_series(group, panel.key).values) for group in groups for panel in PANELS)
    return all((rows == rows[0]).all() for rows in has_value)
