"""The report's picture, read back from its lines and bars."""

from itertools import pairwise

import numpy as np
import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.rollout.debug_data import save_rollout_dump
from miles.tools.aggregation_report.__main__ import main
from miles.tools.aggregation_report.figure import BAND, MAX_BINS, bin_weights, quarter_shares
from miles.tools.figure_style import mode_style
from tests.fast.length_mix import length_mix, mixed_samples
from tests.fast.tools.aggregation_report.pictures import (
    MODE_LIST,
    bars_of,
    drawn,
    figure_samples,
    lines_of,
    many_samples,
)

QUARTERS = ["shortest", "second", "third", "longest"]


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")


def _worked_example(modes=MODE_LIST):
    # docs/loss-aggregation.md's: answers of 2 and 6 tokens, and two of 1; N = 4, P = 2, M = 10, L = 8. A token weighs
    # 1 / (N m_i), 1 / (P M_g), 1 / M and 1 / (L N).
    divisors = {
        MODES["sample_mean"]: [4 * 2, 4 * 6, 4 * 1, 4 * 1],
        MODES["prompt_mean"]: [2 * 8, 2 * 8, 2 * 2, 2 * 2],
        MODES["token_mean"]: [10] * 4,
        MODES["constant"]: [8 * 4] * 4,
    }
    return figure_samples([2, 6, 1, 1], {mode: divisors[mode] for mode in modes}, quarters=[2, 3, 0, 1])


def test_lines_are_multiples_of_a_token_under_token_mean():
    # Times M = 10: of the answers with 1, 2 and 6 tokens.
    expected = {
        "sample_mean": [(1, 10 / 4), (2, 10 / 8), (6, 10 / 24)],
        "prompt_mean": [(1, 10 / 4), (2, 10 / 16), (6, 10 / 16)],
        "token_mean": [(1, 1), (2, 1), (6, 1)],
        "constant": [(1, 10 / 32), (2, 10 / 32), (6, 10 / 32)],
    }
    lines = lines_of(drawn(_worked_example()))
    assert list(lines) == list(expected)
    for label, points in expected.items():
        np.testing.assert_allclose(lines[label], points, rtol=1e-15)


def test_bars_are_shares_of_the_weight_in_percent():
    # Of the answers with 1, 1, 2 and 6 tokens. prompt_mean: 1/4, 1/4, 2/16 and 6/16 of a whole of 1.
    figure = drawn(_worked_example())
    bars = bars_of(figure)
    assert bars["sample_mean"] == pytest.approx([25, 25, 25, 25])
    assert bars["prompt_mean"] == pytest.approx([25, 25, 12.5, 37.5])
    assert bars["token_mean"] == pytest.approx([10, 10, 20, 60])
    assert bars["constant"] == pytest.approx([10, 10, 20, 60])
    [tokens] = figure.axes[1].collections
    assert [segment[0][1] for segment in tokens.get_segments()] == pytest.approx([10, 10, 20, 60])
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == QUARTERS


def test_each_series_looks_as_its_mode_does_everywhere():
    figure = drawn(_worked_example())
    for line in figure.axes[0].lines:
        style = mode_style(line.get_label())
        assert (line.get_color(), line.get_marker()) == (style.colour, style.marker)
    hatches = {bar.get_hatch() for bar in figure.axes[1].patches}
    assert hatches == {style.hatch for style in map(mode_style, MODES)}


def test_the_legend_tells_the_divisor():
    figure = drawn(_worked_example(), divisor=1536.0)
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
    samples = figure_samples([5] * 101, {MODES["prompt_mean"]: [100.0 + place for place in range(101)]})
    [band] = drawn(samples).axes[0].collections
    lengths, heights = band.get_paths()[0].vertices.T
    assert lengths.min() < 5 < lengths.max() <= 1.1 * lengths.min()  # else nothing is seen of it
    assert (heights.min(), heights.max()) == pytest.approx((1 / 195, 1 / 105))


def test_fully_masked_samples_have_no_token_to_weigh():
    samples = figure_samples(
        [3, 4, 5, 9],
        {MODES["sample_mean"]: [12.0, 16.0, 20.0, 4.0]},
        active=[3, 4, 5, 0],
        quarters=[0, 1, 2, 3],
    )
    figure = drawn(samples)
    np.testing.assert_allclose(lines_of(figure)["sample_mean"], [(3, 1 / 12), (4, 1 / 16), (5, 1 / 20)])
    assert bars_of(figure)["sample_mean"] == pytest.approx([100 / 3, 100 / 3, 100 / 3, 0])


@pytest.mark.parametrize("absent", MODE_LIST)
def test_modes_that_cannot_be_computed_are_left_out(absent):
    figure = drawn(_worked_example([mode for mode in MODE_LIST if mode is not absent]))
    assert absent.name not in lines_of(figure) and absent.name not in bars_of(figure)
    assert ("1 = token_mean" in figure.axes[0].get_ylabel()) == (absent is not MODES["token_mean"])
    assert absent.name not in {text.get_text() for text in figure.legends[0].get_texts()}


@pytest.mark.parametrize("modes", [MODE_LIST, MODE_LIST[:2]])  # as multiples of token_mean's 0, weights are NaN
@pytest.mark.parametrize("is_masked", [True, False])
def test_where_no_token_has_weight_the_picture_says_so(is_masked, modes):
    divisor, active = (1.0, [0, 0]) if is_masked else (float("inf"), [3, 4])  # a loss weight of 0 weighs 1 / inf
    figure = drawn(figure_samples([3, 4], {mode: [divisor] * 2 for mode in modes}, active=active))
    assert all(len(points) == 0 for points in lines_of(figure).values())
    assert all(heights == [0, 0, 0, 0] for heights in bars_of(figure).values())
    assert [text.get_text() for text in figure.axes[0].texts] == ["no token has weight"]
    assert len(figure.axes[0].get_xticks()) == len(figure.axes[0].get_yticks()) == 0
    bottom, top = figure.axes[1].get_ylim()
    assert (bottom, top) == (0, 100) if is_masked else bottom == 0 and top >= 100 * 4 / 7  # the tokens have shares


def test_a_sample_whose_loss_weights_are_zero_leaves_the_axis_to_the_others():
    divisors = {MODES["prompt_mean"]: [2.0, 4.0, float("inf")]}
    axes = drawn(figure_samples([10, 20, 40], divisors)).axes[0]
    assert axes.get_ylim() == pytest.approx((8**-0.5 / 2, 8**-0.5 * 2))  # around 1/4 and 1/2


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_of_equal_lengths_every_mode_is_seen(divisor):
    """Modes weigh the same then: a later one's marker lies within an earlier one's."""
    figure = drawn(figure_samples([5] * 4, {mode: [divisor] * 4 for mode in MODE_LIST}))
    sizes = [line.get_markersize() for line in figure.axes[0].lines]
    assert [line.get_xydata().tolist() for line in figure.axes[0].lines] == [[[5.0, 1.0]]] * 4
    assert all(first >= 1.3 * second for first, second in pairwise(sizes)) and sizes[-1] >= 5


@pytest.mark.parametrize("num_modes", [1, 2, 3, 4])
def test_bars_stand_side_by_side_over_their_quarter(num_modes):
    figure = drawn(_worked_example(MODE_LIST[:num_modes]))
    bars = sorted(figure.axes[1].patches, key=lambda bar: bar.get_x())
    edges = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
    assert all(end < start for (_, end), (start, _) in pairwise(edges))
    for quarter, segment in enumerate(figure.axes[1].collections[0].get_segments()):
        own = range(quarter * num_modes, (quarter + 1) * num_modes)
        assert [bars[place].get_hatch() for place in own] == [
            mode_style(mode.name).hatch for mode in MODE_LIST[:num_modes]
        ]
        # Symmetric about the quarter's tick, under all of the line of its tokens, and nowhere else.
        left, right = edges[own[0]][0], edges[own[-1]][1]
        assert (left + right) / 2 == pytest.approx(quarter)
        assert segment[:, 0] == pytest.approx([quarter - 0.42, quarter + 0.42])
        assert quarter - 0.42 <= left < quarter - 0.36 and quarter + 0.36 < right <= quarter + 0.42
    assert figure.axes[1].get_ylim()[1] > max(bar.get_height() for bar in bars)
    widths = [end - start for start, end in edges]
    assert widths == pytest.approx([widths[0]] * len(widths)) and sum(widths) >= 0.75 * 4


def test_one_sample_has_its_axes_around_it():
    figure = drawn(figure_samples([7], {mode: [7.0] for mode in MODE_LIST}, quarters=[3]))
    assert figure.axes[0].get_xlim() == pytest.approx((3.5, 14))
    assert figure.axes[0].get_ylim() == pytest.approx((0.5, 2))
    assert bars_of(figure)["constant"] == [0, 0, 0, 100]


def test_a_hundred_thousand_samples_are_a_few_points():
    figure = drawn(many_samples(100_000))
    assert all(len(points) <= MAX_BINS for points in lines_of(figure).values())
    assert all(len(path.vertices) < 200 for band in figure.axes[0].collections for path in band.get_paths())


def test_shares_of_nothing_are_zero():
    assert quarter_shares(np.zeros(3), np.array([0, 1, 3])).tolist() == [0, 0, 0, 0]


def test_the_report_draws_real_samples(tmp_path):
    dump, picture = tmp_path / "rollouts.pt", tmp_path / "weights.png"
    save_rollout_dump(str(dump), 0, mixed_samples(64))
    assert main([str(dump), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
