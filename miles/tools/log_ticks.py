"""Where a logarithmic axis has its numbers: as many plain ones as stand beside each other without touching.

Shapes: K ticks, D decades.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator

DIGIT, POINT, GAP, LINE = 0.64, 0.32, 0.6, 1.6
"""Heights of the font: the widths of a digit and of a point or comma in DejaVu Sans, what stays free between two
labels beside each other, and a line with what stays free around it."""
POWERS = (-307, 307)
"""Powers of ten of which every multiple here is a float."""
ENOUGH = 3
"""Ticks from which a reader sees that an axis is logarithmic."""
STRIDES = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500)


def tick_label(value: float) -> str:
    """Return a number of a logarithmic axis as it stands there."""
    return f"{value:,.6g}"


def log_ticks(low: float, high: float, *, room: float, is_across: bool) -> np.ndarray:
    """Return where a logarithmic axis is labelled: the most wanted of a few series whose labels do not touch.

    Args:
        low: The axis begins here, above 0.
        high: It ends here, above `low`.
        room: The axis's length, in heights of the font.
        is_across: Whether labels stand beside each other, and need their width; else one above the other.

    Returns:
        [K] float64, ascending: 1, 2 and 5 times powers of ten, 1 and 3 times, powers of ten, every second of these
        and so on; numbers between on an axis of less than a decade. Three at least where any of these has so many.
    """
    decade = room / (math.log10(high) - math.log10(low))
    series = [ticks[(ticks >= low) & (ticks <= high)] for ticks in _series(low, high)]
    fitting = [ticks for ticks in series if _stand_apart(ticks, decade, is_across)]
    return next((ticks for ticks in fitting if len(ticks) >= ENOUGH), max(fitting, key=len))


def _series(low: float, high: float) -> Iterator[np.ndarray]:
    """Yield ticks from below `low` to above `high`, the most wanted first."""
    least, largest = POWERS
    powers = np.arange(max(math.floor(math.log10(low)), least), min(math.floor(math.log10(high)), largest) + 1)
    decades = np.array([float(f"1e{power}") for power in powers])
    for factors in ((1, 2, 5), (1, 3)):
        yield np.outer(decades, factors).ravel()
    for stride in STRIDES:
        yield decades[powers % stride == 0]
    yield np.outer(decades, (1, 1.5, 2, 3, 5, 7)).ravel()


def _stand_apart(ticks: np.ndarray, decade: float, is_across: bool) -> bool:
    """Return whether no label touches the next, where a decade is so many heights of the font long."""
    sizes = np.array([_width(tick_label(tick)) + GAP if is_across else LINE for tick in ticks])
    return bool(np.all(np.diff(np.log10(ticks)) * decade >= (sizes[1:] + sizes[:-1]) / 2))


def _width(label: str) -> float:
    return sum(POINT if letter in ",." else DIGIT for letter in label)


class PlainTicks(LogLocator):
    """The ticks of `log_ticks` on an axis, at the length that it has when it is drawn.

    Args:
        font_size: Of its labels, in points.
    """

    def __init__(self, font_size: float) -> None:
        super().__init__()
        self.font_size = font_size

    def tick_values(self, vmin: float, vmax: float) -> np.ndarray:
        """Return the ticks between two ends, in either order."""
        low, high = sorted((vmin, vmax))
        is_across = self.axis.axis_name == "x"
        return log_ticks(low, high, room=_points(self.axis, is_across) / self.font_size, is_across=is_across)


def _points(axis: Axis, is_across: bool) -> float:
    box = axis.axes.bbox
    return 72 * (box.width if is_across else box.height) / axis.axes.figure.dpi
