"""The report's picture, read back from its lines and bars."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.rollout.debug_data import save_rollout_dump
from miles.tools.aggregation_report.__main__ import main
from miles.tools.aggregation_report.figure import BAND, MAX_BINS, bin_weights, draw_weights, quarter_shares
from miles.tools.figure_style import MODE_STYLES
from tests.fast.length_mix import SAMPLES_PER_PROMPT, length_mix, mixed_samples

MODES = tuple(LossAggregation)
QUARTERS = ["shortest", "second", "third", "longest"]


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")


def _samples(lengths, divisors, *, active=None, quarters=None):
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


def _worked_example(modes=MODES):
    # docs/loss-aggregation.md's: answers of 2 and 6 tokens, and two of 1; N = 4, P = 2, M = 10, L = 8. A token weighs
    # 1 / (N m_i), 1 / (P M_g), 1 / M and 1 / (L N).
    divisors = {
        LossAggregation.SAMPLE_MEAN: [4 * 2, 4 * 6, 4 * 1, 4 * 1],
        LossAggregation.PROMPT_MEAN: [2 * 8, 2 * 8, 2 * 2, 2 * 2],
        LossAggregation.TOKEN_MEAN: [10] * 4,
        LossAggregation.CONSTANT: [8 * 4] * 4,
    }
    return _samples([2, 6, 1, 1], {mode: divisors[mode] for mode in modes}, quarters=[2, 3, 0, 1])


def _lines(figure):
    return {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}


def _bars(figure):
    """Heights of the bars by colour, from the shortest quarter to the longest."""
    heights = {}
    for bar in sorted(figure.axes[1].patches, key=lambda bar: bar.get_x()):
        red, green, blue, _ = bar.get_facecolor()
        colour = "#{:02X}{:02X}{:02X}".format(*(round(255 * part) for part in (red, green, blue)))
        heights.setdefault(colour, []).append(bar.get_height())
    return {mode: heights[style.colour] for mode, style in MODE_STYLES.items() if style.colour in heights}


def test_lines_are_multiples_of_a_token_under_token_mean():
    # Times M = 10: of the answers with 1, 2 and 6 tokens.
    expected = {
        "sample_mean": [(1, 10 / 4), (2, 10 / 8), (6, 10 / 24)],
        "prompt_mean": [(1, 10 / 4), (2, 10 / 16), (6, 10 / 16)],
        "token_mean": [(1, 1), (2, 1), (6, 1)],
        "constant": [(1, 10 / 32), (2, 10 / 32), (6, 10 / 32)],
    }
    lines = _lines(draw_weights(_worked_example()))
    assert list(lines) == list(expected)
    for label, points in expected.items():
        np.testing.assert_allclose(lines[label], points, rtol=1e-15)


def test_bars_are_shares_of_the_weight_in_percent():
    # Of the answers with 1, 1, 2 and 6 tokens. prompt_mean: 1/4, 1/4, 2/16 and 6/16 of a whole of 1.
    figure = draw_weights(_worked_example())
    bars = _bars(figure)
    assert bars["sample_mean"] == pytest.approx([25, 25, 25, 25])
    assert bars["prompt_mean"] == pytest.approx([25, 25, 12.5, 37.5])
    assert bars["token_mean"] == pytest.approx([10, 10, 20, 60])
    assert bars["constant"] == pytest.approx([10, 10, 20, 60])
    [tokens] = figure.axes[1].collections
    assert [segment[0][1] for segment in tokens.get_segments()] == pytest.approx([10, 10, 20, 60])
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == QUARTERS


def test_each_series_looks_as_its_mode_does_everywhere():
    figure = draw_weights(_worked_example())
    for line in figure.axes[0].lines:
        style = MODE_STYLES[line.get_label()]
        assert (line.get_color(), line.get_marker()) == (style.colour, style.marker)
    hatches = {bar.get_hatch() for bar in figure.axes[1].patches}
    assert hatches == {style.hatch for style in MODE_STYLES.values()}


def test_the_legend_tells_the_divisor():
    figure = draw_weights(_worked_example(), divisor=1536.0)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["sample_mean", "prompt_mean", "token_mean", "constant, L = 1,536", "share of the tokens"]


def test_many_lengths_are_binned_as_plain_loops_do():
    lengths = np.array([*(response for _, response in length_mix(1024)), 1990, 1999, 2000])
    weights = 1 / lengths + np.arange(1027) / 1e5
    weights[::100] = np.nan
    binned = bin_weights(lengths, weights)
    known = [(length, weight) for length, weight in zip(lengths, weights, strict=True) if weight == weight]
    shortest, longest = min(length for length, _ in known), max(length for length, _ in known)
    rows = []
    for number in range(MAX_BINS):
        low, high = (shortest * (longest / shortest) ** (place / MAX_BINS) for place in (number, number + 1))
        is_last = number == MAX_BINS - 1
        inside = [pair for pair in known if (low <= pair[0] or number == 0) and (pair[0] < high or is_last)]
        if inside:
            each = sorted(weight for _, weight in inside)
            # The q-th percentile of n values stands at place q / 100 * (n - 1), between two of them.
            rows.append((np.median([pair[0] for pair in inside]), *(_percentile(each, q) for q in (50, *BAND))))
    np.testing.assert_allclose(np.array([binned.lengths, binned.medians, binned.lows, binned.highs]).T, rows)
    assert 10 < len(rows) <= MAX_BINS


def _percentile(ascending, q):
    place = q / 100 * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])


def test_a_band_shows_how_far_prompts_spread():
    # 101 answers of 5 tokens that weigh 1/100 to 1/200 a token; the band is from the 6th to the 96th of them.
    samples = _samples([5] * 101, {LossAggregation.PROMPT_MEAN: [100.0 + place for place in range(101)]})
    [band] = draw_weights(samples).axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((1 / 195, 1 / 105))


def test_fully_masked_samples_have_no_token_to_weigh():
    samples = _samples(
        [3, 4, 5, 9],
        {LossAggregation.SAMPLE_MEAN: [12.0, 16.0, 20.0, 4.0]},
        active=[3, 4, 5, 0],
        quarters=[0, 1, 2, 3],
    )
    figure = draw_weights(samples)
    np.testing.assert_allclose(_lines(figure)["sample_mean"], [(3, 1 / 12), (4, 1 / 16), (5, 1 / 20)])
    assert _bars(figure)["sample_mean"] == pytest.approx([100 / 3, 100 / 3, 100 / 3, 0])


@pytest.mark.parametrize("absent", MODES)
def test_modes_that_cannot_be_computed_are_left_out(absent):
    figure = draw_weights(_worked_example([mode for mode in MODES if mode is not absent]))
    assert absent.value not in _lines(figure) and absent.value not in _bars(figure)
    assert ("1 = token_mean" in figure.axes[0].get_ylabel()) == (absent is not LossAggregation.TOKEN_MEAN)
    assert absent.value not in {text.get_text() for text in figure.legends[0].get_texts()}


def test_nothing_but_masked_samples():
    figure = draw_weights(_samples([3, 4], {mode: [1.0, 2.0] for mode in MODES}, active=[0, 0]))
    assert all(len(points) == 0 for points in _lines(figure).values())
    assert all(heights == [0, 0, 0, 0] for heights in _bars(figure).values())


def test_one_sample_has_its_axes_around_it():
    figure = draw_weights(_samples([7], {mode: [7.0] for mode in MODES}, quarters=[3]))
    assert figure.axes[0].get_xlim() == pytest.approx((3.5, 14))
    assert figure.axes[0].get_ylim() == pytest.approx((0.5, 2))
    assert _bars(figure)["constant"] == [0, 0, 0, 100]


def _many_samples(number):
    lengths = [response for _, response in length_mix(number)]
    total = sum(lengths)
    groups = np.add.reduceat(lengths, range(0, number, SAMPLES_PER_PROMPT)).repeat(SAMPLES_PER_PROMPT)
    divisors = {
        LossAggregation.SAMPLE_MEAN: [number * length for length in lengths],
        LossAggregation.PROMPT_MEAN: (groups * (number // SAMPLES_PER_PROMPT)).tolist(),
        LossAggregation.TOKEN_MEAN: [total] * number,
        LossAggregation.CONSTANT: [2048 * number] * number,
    }
    order = np.argsort(np.argsort(lengths, kind="stable"))
    return _samples(lengths, divisors, quarters=(4 * order // number).tolist())


def test_a_hundred_thousand_samples_are_a_few_points():
    figure = draw_weights(_many_samples(100_000))
    assert all(len(points) <= MAX_BINS for points in _lines(figure).values())
    assert all(len(path.vertices) < 200 for band in figure.axes[0].collections for path in band.get_paths())


def test_no_text_lies_on_another():
    from matplotlib.text import Text

    figure = draw_weights(_many_samples(1024), divisor=131_072)
    figure.draw_without_rendering()
    texts = [figure.legends[0]]
    for axes in figure.axes:
        texts += [child for child in axes.get_children() if isinstance(child, Text) and child.get_text()]
        texts += [axes.xaxis.label, axes.yaxis.label]
        texts += [label for label in (*axes.get_xticklabels(), *axes.get_yticklabels()) if _is_inside(axes, label)]
    boxes = [text.get_window_extent() for text in texts]
    clashes = [
        (first, second) for place, first in enumerate(boxes) for second in boxes[:place] if first.overlaps(second)
    ]
    assert not clashes
    assert all(figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max) for box in boxes)


def _is_inside(axes, label):
    """Whether the label's tick is within the limits: those beyond are there but not drawn."""
    (x, y), (left, right), (bottom, top) = label.get_position(), axes.get_xlim(), axes.get_ylim()
    return label.get_text() and (left <= x <= right or x == 0) and (bottom <= y <= top or y == 0)


def test_shares_of_nothing_are_zero():
    assert quarter_shares(np.zeros(3), np.array([0, 1, 3])).tolist() == [0, 0, 0, 0]


def test_the_report_draws_real_samples(tmp_path):
    dump, picture = tmp_path / "rollouts.pt", tmp_path / "weights.png"
    save_rollout_dump(str(dump), 0, mixed_samples(64))
    assert main([str(dump), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
