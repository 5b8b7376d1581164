"""The picture of runs, read back from its lines, bands and texts."""

import numpy as np
import pytest

from miles.tools.figure_style import MODE_STYLES, OTHER_STYLES
from miles.tools.plot_run.figure import draw_runs, group_series, group_styles, running_mean
from miles.tools.plot_run.runs import group_runs, read_runs
from miles.utils.argument_groups.aggregation import LOSS_AGGREGATIONS
from tests.fast.tools.plot_run.folders import step, write_run


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")


def _groups(tmp_path, **runs):
    """Groups of runs by folder name: each (records, arguments)."""
    return group_runs(
        read_runs([write_run(tmp_path / name, records, **more) for name, (records, more) in runs.items()])
    )


def _lines(axes):
    return [line.get_xydata().tolist() for line in axes.lines]


def test_each_panel_shows_its_metric_over_the_steps(tmp_path):
    [figure] = [draw_runs(_groups(tmp_path, a=([step(0, 0.5, 7, -0.25, 2), step(4, 0.75, 6, 0.5, 3)], {})))]
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Reward",
        "Response length",
        "Loss",
        "Gradient norm",
    ]
    assert [_lines(axes) for axes in figure.axes] == [
        [[[0, 0.5], [4, 0.75]]],
        [[[0, 7], [4, 6]]],
        [[[0, -0.25], [4, 0.5]]],
        [[[0, 2], [4, 3]]],
    ]
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "linear", "log"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]
    assert figure.get_supxlabel() == "optimizer step"


def test_repeated_runs_are_thin_lines_with_a_bold_mean_and_a_band(tmp_path):
    # All three share steps 0 and 2; seed 1 was not finite at step 1, and seed 2 is a step longer.
    first = [step(0, 0.2), step(1, None), step(2, 0.6)]
    second = [step(0, 0.4), step(1, 0.5), step(2, 1.0), step(3, 0.9)]
    third = [step(0, 0.9), step(1, 0.8), step(2, 0.95)]
    runs = {name: (records, {"seed": name}) for name, records in zip("abc", (first, second, third), strict=True)}
    figure = draw_runs(_groups(tmp_path, **runs))
    *thin, mean = figure.axes[0].lines
    np.testing.assert_array_equal(thin[0].get_xydata(), [[0, 0.2], [1, np.nan], [2, 0.6]])
    np.testing.assert_array_equal(thin[1].get_xydata(), [[0, 0.4], [1, 0.5], [2, 1.0], [3, 0.9]])
    # (0.2 + 0.4 + 0.9) / 3, (0.6 + 1.0 + 0.95) / 3
    np.testing.assert_allclose(mean.get_xydata(), [[0, 0.5], [2, 0.85]])
    assert len({line.get_linewidth() for line in thin}) == 1 and thin[0].get_linewidth() < mean.get_linewidth()
    assert len({line.get_color() for line in (*thin, mean)}) == 1
    [band] = figure.axes[0].collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(0, 0.2), (0, 0.9), (2, 0.6), (2, 1.0)}
    assert figure.get_supxlabel() == "optimizer step\nbold: mean of 3 runs; thin: each of them; band: their range"


def test_runs_that_share_no_step_have_no_mean(tmp_path):
    [group] = _groups(tmp_path, a=([step(0, 0.2)], {"seed": 1}), b=([step(1, 0.4)], {"seed": 2}))
    series = group_series(group, "rollout/raw_reward")
    assert (series.steps.tolist(), series.values.shape) == ([], (2, 0))
    assert [len(line.get_xydata()) for line in draw_runs([group]).axes[0].lines] == [1, 1, 0]


def test_modes_have_their_colours_where_they_differ(tmp_path):
    runs = {mode: ([step(0, 0.5)], {"loss_aggregation": mode}) for mode in reversed(LOSS_AGGREGATIONS)}
    groups = _groups(tmp_path, **runs)
    assert group_styles(groups) == [MODE_STYLES[mode] for mode in reversed(LOSS_AGGREGATIONS)]
    colours = [line.get_color() for line in draw_runs(groups).axes[0].lines]
    assert colours == [MODE_STYLES[mode].colour for mode in reversed(LOSS_AGGREGATIONS)]
    assert group_styles(groups[:1]) == [MODE_STYLES["constant"]]


def test_groups_of_one_mode_among_others_share_its_colour_and_differ_in_their_dashes(tmp_path):
    runs = {
        f"{mode}-{lr}": ([step(0, 0.5)], {"loss_aggregation": mode, "lr": lr})
        for mode in ("prompt_mean", "token_mean")
        for lr in range(5)
    }
    groups = _groups(tmp_path, **runs)
    (tmp_path / "prompt_mean-0" / "args.json").unlink()
    unknown = _unknown(tmp_path / "prompt_mean-0")
    styles = group_styles([*groups, unknown])
    assert [style.colour for style in styles[:10]] == [MODE_STYLES["prompt_mean"].colour] * 5 + ["#000000"] * 5
    assert len({(style.colour, style.dashes) for style in styles}) == 11
    assert styles[10].colour not in {style.colour for style in MODE_STYLES.values()}


def _unknown(directory):
    [group] = group_runs(read_runs([directory]))
    return group


def test_groups_of_one_mode_have_one_style_after_another(tmp_path):
    runs = {f"run-{place}": ([step(0, 0.5)], {"lr": 0.1 * place}) for place in range(9)}
    groups = _groups(tmp_path, **runs)
    assert group_styles(groups) == [*OTHER_STYLES, *OTHER_STYLES[:2]]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_running_mean_is_that_of_plain_loops(size):
    values = [0.5, 2.0, float("nan"), 7.0, -1e30, 1.5, float("inf"), 3.0, 0.25, 0.5]
    expected = []
    for place, value in enumerate(values):
        window = [each for each in values[max(place - size + 1, 0) : place + 1] if np.isfinite(each)]
        expected.append(sum(window) / len(window) if np.isfinite(value) else float("nan"))
    np.testing.assert_allclose(running_mean(np.array(values), size), expected, rtol=1e-14)


def test_smoothing_is_drawn_and_told(tmp_path):
    records = [step(number, reward) for number, reward in enumerate((0.1, 0.3, 0.8))]
    figure = draw_runs(_groups(tmp_path, a=(records, {})), smooth=2)
    # 0.1; (0.1 + 0.3) / 2; (0.3 + 0.8) / 2
    np.testing.assert_allclose(_lines(figure.axes[0])[0], [[0, 0.1], [1, 0.2], [2, 0.55]])
    assert figure.get_supxlabel() == "optimizer step\nrunning mean over 2 steps"


def test_what_no_run_has_logged_is_said(tmp_path):
    figure = draw_runs(_groups(tmp_path, a=([step(0, None, 7.0)], {})))
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [
        ["not logged"],
        [],
        ["not logged"],
        ["not logged"],
    ]


def test_a_gradient_of_zero_is_drawn(tmp_path):
    figure = draw_runs(_groups(tmp_path, a=([step(0, 0, 7, 0, 0), step(1, 0, 7, 0, 2)], {})))
    assert figure.axes[3].get_yscale() == "linear"
    assert _lines(figure.axes[3]) == [[[0, 0], [1, 2]]]


@pytest.mark.parametrize("num_groups", [1, 4, 30])
def test_legend_and_panels_do_not_overlap(tmp_path, num_groups):
    runs = {
        f"run-{place}": ([step(0, 0.5, 7, 0, 1)], {"lr": 0.1 * place, "custom_rm_path": "x" * 150})
        for place in range(1, num_groups)
    }
    figure = draw_runs(_groups(tmp_path, run=([step(0, 0.5, 7, 0, 1)], {}), **runs))
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    panels = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(legend.overlaps(panel) for panel in panels)
    assert not any(first.overlaps(second) for place, first in enumerate(panels) for second in panels[:place])
    assert figure.bbox.x0 <= legend.x0 and legend.x1 <= figure.bbox.x1 and legend.y1 <= figure.bbox.y1
    assert min(axes.get_window_extent().height for axes in figure.axes) > 200
