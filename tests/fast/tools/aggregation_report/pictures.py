"""Pictures of the report, drawn for real and read back from their lines, bars and texts."""

import warnings
from types import SimpleNamespace

import numpy as np
import torch

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools.aggregation_report.figure import draw_weights
from miles.tools.figure_style import figure_style, mode_style
from tests.fast.length_mix import SAMPLES_PER_PROMPT, length_mix

MODE_LIST = tuple(MODES.values())


def figure_samples(lengths, divisors, *, active=None, quarters=None):
    """What the figure reads of `SampleWeights`: a token of sample i weighs 1 / divisors[mode][i]."""
    active = torch.tensor(lengths if active is None else active)
    each = {mode: 1 / torch.tensor(values, dtype=torch.float64) for mode, values in divisors.items()}
    return SimpleNamespace(
        lengths=torch.tensor(lengths),
        num_active=active,
        quarters=torch.tensor(quarters or [min(place, 3) for place in range(len(lengths))]),
        weights={mode: active * weights for mode, weights in each.items()},
        token_weights={mode: active * weights / active for mode, weights in each.items()},
    )


def many_samples(number):
    """Samples of the length mix, with what they weigh by the formulas of the modes; L = 2048."""
    lengths = [response for _, response in length_mix(number)]
    total = sum(lengths)
    groups = np.add.reduceat(lengths, range(0, number, SAMPLES_PER_PROMPT)).repeat(SAMPLES_PER_PROMPT)
    divisors = {
        MODES["sample_mean"]: [number * length for length in lengths],
        MODES["prompt_mean"]: (groups * (number // SAMPLES_PER_PROMPT)).tolist(),
        MODES["token_mean"]: [total] * number,
        MODES["constant"]: [2048 * number] * number,
    }
    order = np.argsort(np.argsort(lengths, kind="stable"))
    return figure_samples(lengths, divisors, quarters=(4 * order // number).tolist())


def drawn(samples, **options):
    """The report's picture, rendered, which has to go without a warning."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw_weights(samples, **options)
    with figure_style(), warnings.catch_warnings():
        warnings.simplefilter("error")
        FigureCanvasAgg(figure).draw()
    return figure


def lines_of(figure):
    """[K, 2] points of the lines by label."""
    return {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}


def bars_of(figure):
    """Heights of the bars by colour, from the shortest quarter to the longest."""
    heights = {}
    for bar in sorted(figure.axes[1].patches, key=lambda bar: bar.get_x()):
        red, green, blue, _ = bar.get_facecolor()
        colour = "#{:02X}{:02X}{:02X}".format(*(round(255 * part) for part in (red, green, blue)))
        heights.setdefault(colour, []).append(bar.get_height())
    return {mode: heights[style.colour] for mode in MODES if (style := mode_style(mode)).colour in heights}
