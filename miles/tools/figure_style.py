"""How every figure of this package looks, and how it reaches a file.

Figures are made without pyplot: no display, no global state. A light page with dark text; the colours of Okabe and Ito
(Color Universal Design, 2008), each with a marker, a line style and a hatch of its own for print and for colour-blind
readers. Matplotlib is imported where a figure is made, never when this module is.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.backends.training_utils.loss_aggregation import MODES
from miles.utils.errors import UserError
from miles.utils.misc import check_writable, write_whole

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIX = ".png"
DPI = 160
"""Pixels per inch. Text of 10 points in a figure 9 inches wide is 14 pixels high where a page shows it 900 wide."""
MAX_INCHES = 40.0
"""Largest side of a figure; more would fill the memory, and nobody could look at it."""
FONT_SIZE = 10.0
"""In points, of all text but titles."""
TEXT_COLOUR = "#222222"
GRID_COLOUR = "#dddddd"
REFERENCE_COLOUR = "#6b6b6b"
"""For what is no series of its own: shares and levels to compare with."""

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a figure is the same on every machine
    "font.size": FONT_SIZE,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "text.color": TEXT_COLOUR,
    "axes.labelcolor": TEXT_COLOUR,
    "axes.edgecolor": TEXT_COLOUR,
    "xtick.color": TEXT_COLOUR,
    "ytick.color": TEXT_COLOUR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID_COLOUR,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
}


_LABELLED = ((1.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)), (3.0, (1.0, 2.0, 5.0)), (math.inf, (1.0,)))
"""Which multiples of the powers of ten a logarithmic axis labels, by the decades below which it spans."""


@dataclass(frozen=True)
class Style:
    """What tells one series from the others, each of the four on its own.

    Attributes:
        colour: An sRGB colour, "#rrggbb".
        marker: Matplotlib's name of a marker.
        dashes: Matplotlib's name of a line style, or (offset, lengths of ink and gap in line widths).
        hatch: Matplotlib's pattern inside bars; "" for none.
    """

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[int, ...]]
    hatch: str


# Every pair of the first four differs by 22 or more (CIE76) in normal vision and in protan, deutan and tritan
# simulations (Machado et al. 2009), the lightnesses by 6 or more, and each has a contrast of 3 to 1 or more against
# white.
STYLES: tuple[Style, ...] = (
    Style("#0072B2", "o", "-", ""),
    Style("#D55E00", "s", "--", "////"),
    Style("#000000", "D", ":", r"\\"),
    Style("#CC79A7", "^", "-.", "...."),
    Style("#009E73", "v", (0, (8, 2)), "xxxx"),
    Style("#E69F00", "P", (0, (5, 1, 1, 1, 1, 1)), "++++"),
    Style("#56B4E9", "X", (0, (3, 1)), "oooo"),
)
"""For series one after another; those of the four modes come first."""

UNKNOWN_MODE_STYLE = STYLES[-1]
"""Of runs whose mode is not known."""


def nth_style(place: int) -> Style:
    """Return the style of the place-th series, from 0; beyond `STYLES`, its colours come again with other dashes."""
    number, row = place % len(STYLES), place // len(STYLES)
    return replace(STYLES[number], dashes=STYLES[(number + row) % len(STYLES)].dashes)


def mode_style(name: str | None) -> Style:
    """Return how a mode of `--loss-aggregation` looks in every figure, by its place in the table of modes."""
    return nth_style(list(MODES).index(name)) if name in MODES else UNKNOWN_MODE_STYLE


def require_matplotlib() -> None:
    """Check that figures can be drawn, before anything is computed for one.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"figures are drawn with matplotlib, which cannot be imported ({error}); in this project's folder: "
            'pip install -e ".[plot]"'
        ) from error


def check_figure_path(path: str | Path) -> Path:
    """Return the path of a figure that can be written, checked before anything is computed for it.

    Raises:
        UserError: the name does not end in .png, its folder does not exist or is not writable, or it names a folder.
    """
    path = Path(path)
    check_writable(path, what=f"cannot write figure {path}", example=f"figure{SUFFIX}")
    if path.suffix.lower() != SUFFIX:
        raise UserError(f"a figure is written as {SUFFIX}, got {str(path)!r}; name it {path.with_suffix(SUFFIX).name}")
    return path


@contextlib.contextmanager
def figure_style() -> Iterator[None]:
    """Draw in this package's style inside the context, whatever a person's own matplotlib settings say.

    Raises:
        UserError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, laid out so that nothing overlaps. Call inside `figure_style`.

    Args:
        width: In inches.
        height: In inches.

    Raises:
        UserError: either is more than `MAX_INCHES`.
    """
    from matplotlib.figure import Figure

    if max(width, height) > MAX_INCHES:
        raise UserError(
            f"a figure may be {MAX_INCHES:g} inches wide and high, and this one would be {width:.0f} x {height:.0f}; "
            "draw fewer things in it"
        )
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def label_in_plain_numbers(axis: Axis) -> None:
    """Let a logarithmic axis count in a few plain numbers, and span a factor of 4 at least.

    Args:
        axis: What it measures is drawn already, something of it above 0.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = (max(float(end), float(axis.get_minpos())) for end in axis.get_data_interval())
    if low <= high < 4 * low:  # around one value, matplotlib would span many decades
        middle, factor = math.sqrt(low) * math.sqrt(high), max(2.0, 1.1 * math.sqrt(high / low))
        axis.axes.set(**{f"{axis.axis_name}lim": (middle / factor, middle * factor)})
    decades = math.log10(high) - math.log10(low)
    labelled = next(factors for limit, factors in _LABELLED if decades < limit)
    axis.set_major_locator(LogLocator(subs=labelled))
    axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write the figure as PNG so that a reader sees the whole file or none.

    Args:
        figure: What `new_figure` made.
        path: Ends in .png; its folder exists.

    Returns:
        The path written.

    Raises:
        UserError: the path cannot be written.
    """
    path = check_figure_path(path)
    content = _to_png(figure)
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write figure {path}: {error.strerror or error}") from error
    return path


def _to_png(figure: Figure) -> bytes:
    from PIL import Image  # matplotlib needs Pillow itself

    drawn, packed = io.BytesIO(), io.BytesIO()
    with figure_style():
        figure.savefig(drawn, format="png", dpi=DPI)
    # A palette makes the file three times smaller. The median cut keeps the colours of lines and bars as they are.
    palette = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    palette.save(packed, format="png", optimize=True, dpi=(DPI, DPI))
    return packed.getvalue()
