"""The report's picture over many ranges of lengths and weights: no text on another, none cut off, none missing."""

from itertools import pairwise

import numpy as np
import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from tests.fast.tools.aggregation_report.pictures import MODE_LIST, drawn, figure_samples, many_samples

LENGTHS = {
    "one": [7],
    "equal": [50] * 16,
    "two": [3, 7000] * 8,
    **{
        f"{low} to {high}": np.geomspace(low, high, 40).round().astype(int).tolist()
        for low, high in (
            *((1, high) for high in (2, 3, 10, 100, 2_000, 16_384, 100_000, 10_000_000)),
            *((201, 800), (300, 1_100), (9_000, 11_000), (12_345, 54_321), (99_000, 101_000), (41, 1_571)),
        )
    },
}
ORDERS = (2, 6, 20, 60, 250)
"""Decades that loss weights span, evenly from 1 downwards."""


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")


def _samples(lengths, *, modes=MODE_LIST, loss_weights=None, **options):
    """Answers of one step, each its own prompt, with L = 1024."""
    loss_weights = np.ones(len(lengths)) if loss_weights is None else loss_weights
    number, active = len(lengths), options.get("active", lengths)
    own = {
        MODES["sample_mean"]: [number * length for length in lengths],
        MODES["prompt_mean"]: [number * length for length in lengths],
        MODES["token_mean"]: [max(sum(active), 1)] * number,
        MODES["constant"]: [1024 * number] * number,
    }
    with np.errstate(divide="ignore"):
        divisors = {mode: (np.array(own[mode], dtype=np.float64) / loss_weights).tolist() for mode in modes}
    return figure_samples(lengths, divisors, **options)


def _texts(figure):
    """Boxes of everything that is written, [left, bottom, right, top] in pixels."""
    from matplotlib.text import Text

    texts = [figure.legends[0]]
    for axes in figure.axes:
        texts += [child for child in axes.get_children() if isinstance(child, Text)]  # titles and notes
        texts += [axes.xaxis.label, axes.yaxis.label]
        texts += [label for axis in (axes.xaxis, axes.yaxis) for label in _labels(axis)]
    return [text.get_window_extent() for text in texts if text is figure.legends[0] or text.get_text()]


def _labels(axis):
    """Those of ticks within the limits: others are there, but not drawn."""
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    return [label for place, label in ticks if low <= place <= high and label.get_text()]


def _assert_legible(figure):
    boxes = _texts(figure)
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place]), place
        assert figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max), place
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = _labels(axis)
            assert len(labels) >= (3 if axis.get_majorticklocs().size else 0)
            assert len({label.get_text() for label in labels}) == len(labels)
            assert axis.axis_name == "y" or _gaps(labels) >= 3  # pixels, or two numbers look like one


def _gaps(labels):
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    return min((second.x0 - first.x1 for first, second in pairwise(boxes)), default=np.inf)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths_of_any_range(lengths):
    _assert_legible(drawn(_samples(lengths), divisor=1024.0))


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("lengths", ["equal", "1 to 100000"])
def test_weights_over_many_orders(lengths, orders):
    lengths = LENGTHS[lengths]
    loss_weights = 10.0 ** -np.linspace(0, orders, len(lengths))
    modes = [mode for mode in MODE_LIST if mode is not MODES["token_mean"]]  # else weights are multiples of its
    samples = _samples(lengths, modes=modes, loss_weights=np.random.default_rng(0).permutation(loss_weights))
    figure = drawn(samples)
    _assert_legible(figure)
    low, high = figure.axes[0].get_ylim()
    assert np.log10(high / low) > orders / 2


@pytest.mark.parametrize("active", [[0] * 16, None])
def test_nothing_to_weigh(active):
    options = {"loss_weights": np.zeros(16)} if active is None else {"active": active}
    figure = drawn(_samples([5, 9, 20, 7] * 4, **options))
    _assert_legible(figure)
    assert len(figure.axes[0].texts) == 1


@pytest.mark.parametrize("divisor", [1.0, 131_072.0, 123_456_789.125, 1e300, 1e-300])
def test_divisors_of_any_size_fit_the_legend(divisor):
    _assert_legible(drawn(many_samples(256), divisor=divisor))


@pytest.mark.parametrize("mode", MODE_LIST)
def test_a_mode_alone(mode):
    samples = many_samples(256)
    samples.weights, samples.token_weights = {mode: samples.weights[mode]}, {mode: samples.token_weights[mode]}
    _assert_legible(drawn(samples, divisor=2048.0))
