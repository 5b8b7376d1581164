"""The report's picture: what a token weighs by the length of its answer, and what a quarter of the answers weighs.

Shapes: N samples, K length bins, Q = 4 quarters of the answers by length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation
from miles.tools.aggregation_report.table import plain
from miles.tools.figure_style import (
    REFERENCE_COLOUR,
    Style,
    figure_style,
    label_in_plain_numbers,
    mode_style,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from miles.tools.aggregation_report.weights import SampleWeights

MAX_BINS = 20
BAND = (5.0, 95.0)
"""Percentiles of the weights in a bin, between which the band lies."""
QUARTERS = ("shortest", "second", "third", "longest")
SIZE = (10.0, 4.6)
BARS_WIDTH = 0.84
"""Of a quarter's bars together, where quarters are 1 apart."""
LONE_MARKER, LONE_MARKER_RATIO = 15.0, 0.7
"""Of the modes' markers where all answers are of one length and modes may lie on each other: the first mode's size in
points, and the ratio of each next one to it."""
LONE_BIN = (1 / 1.04, 1.04)
"""A band over one length is as wide as a marker, from and to these multiples of the length."""


@dataclass(frozen=True)
class BinnedWeights:
    """A mode's weight of one token in bins of response length, for K bins that hold at least one unmasked sample.

    Attributes:
        lengths: [K] float64 median response length of the bin's samples, ascending.
        medians: [K] float64 median weight of one token over the bin's samples.
        lows: [K] float64 the lower percentile of `BAND`.
        highs: [K] float64 the upper one.
    """

    lengths: np.ndarray
    medians: np.ndarray
    lows: np.ndarray
    highs: np.ndarray


def length_bins(lengths: np.ndarray) -> np.ndarray:
    """Return the bin of each sample: one for each length where these are few, else `MAX_BINS` of equal log width.

    Args:
        lengths: [N] int64 response tokens, at least 1.

    Returns:
        [N] int64 bins, ascending with the length; some may hold no sample.
    """
    values, places = np.unique(lengths, return_inverse=True)
    if len(values) <= MAX_BINS:
        return places
    edges = np.geomspace(values[0], values[-1], MAX_BINS + 1)
    return np.digitize(lengths, edges[1:-1])


def bin_weights(lengths: np.ndarray, weights: np.ndarray) -> BinnedWeights:
    """Summarize the weights of one token by response length.

    Args:
        lengths: [N] int64 response tokens.
        weights: [N] float64 weight of one token of the sample; NaN where it has no active one.
    """
    known = np.isfinite(weights) & (lengths > 0)
    lengths, weights = lengths[known], weights[known]
    bins = length_bins(lengths) if len(lengths) else lengths
    members = (bins == number for number in np.unique(bins))
    rows = [
        (np.median(lengths[each]), np.median(weights[each]), *np.percentile(weights[each], BAND)) for each in members
    ]
    return BinnedWeights(*np.array(rows, dtype=np.float64).reshape(-1, 4).T)


def relative_token_weights(samples: SampleWeights) -> dict[LossAggregation, np.ndarray]:
    """Return [N] weights of one token for each mode, as multiples of the sample's under `token_mean` where known."""
    reference = samples.token_weights.get(MODES["token_mean"])
    return {
        mode: (weights if reference is None else weights / reference).numpy()
        for mode, weights in samples.token_weights.items()
    }


def quarter_shares(values: np.ndarray, quarters: np.ndarray) -> np.ndarray:
    """Return the share of the values' sum in each quarter, [4] float64; 0 where there is nothing to share.

    Args:
        values: [N] float64, at least 0.
        quarters: [N] int64 in 0..3.
    """
    sums = np.bincount(quarters, weights=values, minlength=len(QUARTERS))
    return sums / (sums.sum() or 1.0)


def draw_weights(samples: SampleWeights, *, divisor: float | None = None) -> Figure:
    """Draw the weight of one token against response length, and the share of the weight by quarter of length.

    Args:
        samples: The report's samples, under at least one mode.
        divisor: L of `constant`, in tokens, for the legend.

    Raises:
        UserError: matplotlib is not installed.
    """
    with figure_style():
        figure = new_figure(*SIZE)
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_token_weights(left, samples, divisor)
        _draw_shares(right, samples)
        handles = [handle for axes in (left, right) for handle in axes.get_legend_handles_labels()[0]]
        figure.legend(
            handles=handles, loc="outside upper center", ncols=len(handles), handlelength=3.0, columnspacing=1.5
        )
    return figure


def _draw_token_weights(axes: Axes, samples: SampleWeights, divisor: float | None) -> None:
    lengths, relative = samples.lengths.numpy(), relative_token_weights(samples)
    has_weight = any((weights > 0).any() for weights in relative.values())
    if not has_weight:  # zeros have no place on a logarithmic axis
        relative = dict.fromkeys(relative, np.full(len(lengths), np.nan))
    for place, (mode, weights) in enumerate(relative.items()):
        size = LONE_MARKER * LONE_MARKER_RATIO**place
        _draw_mode(axes, mode_style(mode.name), bin_weights(lengths, weights), _label(mode, divisor), size)
    is_relative = MODES["token_mean"] in samples.token_weights
    low, high = BAND
    axes.set(
        title="What one token weighs",
        xlabel=f"response length (tokens)\nline: median; band: {low:g}th to {high:g}th percentile",
        ylabel="weight of one token" + (" (1 = token_mean's)" if is_relative else ""),
    )
    if not has_weight:
        axes.text(0.5, 0.5, "no token has weight", transform=axes.transAxes, ha="center", color=REFERENCE_COLOUR)
        axes.set(xticks=[], yticks=[])
        return
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        label_in_plain_numbers(axis)


def _draw_mode(axes: Axes, style: Style, bins: BinnedWeights, label: str, lone_size: float) -> None:
    edges, lows, highs, size = bins.lengths, bins.lows, bins.highs, None
    if len(edges) == 1:
        edges, lows, highs, size = edges * LONE_BIN, lows.repeat(2), highs.repeat(2), lone_size
    axes.fill_between(edges, lows, highs, color=style.colour, alpha=0.18, linewidth=0)
    look = {"color": style.colour, "linestyle": style.dashes, "marker": style.marker, "markersize": size}
    axes.plot(bins.lengths, bins.medians, label=label, **look)


def _label(mode: LossAggregation, divisor: float | None) -> str:
    return f"{mode.name}, L = {plain(divisor)}" if mode.needs_divisor and divisor is not None else mode.name


def _draw_shares(axes: Axes, samples: SampleWeights) -> None:
    quarters = samples.quarters.numpy()
    places = np.arange(len(QUARTERS))
    width = BARS_WIDTH / max(len(samples.weights), 1)
    shares = {mode: 100 * quarter_shares(weights.numpy(), quarters) for mode, weights in samples.weights.items()}
    for number, (mode, heights) in enumerate(shares.items()):
        style = mode_style(mode.name)
        axes.bar(
            places - BARS_WIDTH / 2 + (number + 0.5) * width,
            heights,
            width=0.92 * width,
            color=style.colour,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0,
        )
    tokens = 100 * quarter_shares(samples.num_active.numpy(), quarters)
    axes.hlines(
        tokens,
        places - BARS_WIDTH / 2,
        places + BARS_WIDTH / 2,
        color=REFERENCE_COLOUR,
        label="share of the tokens",
    )
    axes.set(
        title="What each quarter of the answers weighs",
        xlabel="quarter of the answers, by response length",
        ylabel="share of the total weight (%)",
        xticks=places,
        xticklabels=QUARTERS,
        ylim=(0, 1.05 * max(tokens.max(), *map(np.max, shares.values())) or 100),
    )
    axes.grid(visible=False, axis="x")
