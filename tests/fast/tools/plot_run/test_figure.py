"""The picture of runs, read back from its lines, bands and texts."""

import numpy as np
import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools.figure_style import mode_style, save_figure
from miles.tools.plot_run.figure import draw_runs, group_series, running_mean
from miles.tools.plot_run.runs import group_runs, read_runs
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
    figure = draw_runs(_groups(tmp_path, a=([step(3, 0.5, 7, -0.25, 2), step(4, 0.75, 6, 0.5, 3)], {})))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Reward",
        "Response length",
        "Loss",
        "Gradient norm",
    ]
    assert [_lines(axes) for axes in figure.axes] == [
        [[[3, 0.5], [4, 0.75]]],
        [[[3, 7], [4, 6]]],
        [[[3, -0.25], [4, 0.5]]],
        [[[3, 2], [4, 3]]],
    ]
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "linear", "log"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]
    assert figure.get_supxlabel() == "optimizer step"


def _points(line):
    """A line's points, without those that are drawn as a gap."""
    return [point for point in line.get_xydata().tolist() if np.isfinite(point[1])]


def _marked(line):
    """The points that have a marker."""
    return line.get_xydata()[line.get_markevery()].tolist()


def test_repeated_runs_are_thin_lines_with_a_bold_mean_and_a_band(tmp_path):
    # All three have steps 0 and 2; seed 1 was not finite at step 1, and seed 2 is a step longer.
    first = [step(0, 0.2), step(1, None), step(2, 0.6)]
    second = [step(0, 0.4), step(1, 0.5), step(2, 1.0), step(3, 0.9)]
    third = [step(0, 0.9), step(1, 0.8), step(2, 0.95)]
    runs = {name: (records, {"seed": name}) for name, records in zip("abc", (first, second, third), strict=True)}
    figure = draw_runs(_groups(tmp_path, **runs))
    *thin, mean = figure.axes[0].lines
    np.testing.assert_array_equal(thin[0].get_xydata(), [[0, 0.2], [1, np.nan], [2, 0.6], [3, np.nan]])
    np.testing.assert_array_equal(thin[1].get_xydata(), [[0, 0.4], [1, 0.5], [2, 1.0], [3, 0.9]])
    # (0.2 + 0.4 + 0.9) / 3, (0.6 + 1.0 + 0.95) / 3, and none where a run has no value
    np.testing.assert_allclose(mean.get_xydata(), [[0, 0.5], [1, np.nan], [2, 0.85], [3, np.nan]])
    assert len({line.get_linewidth() for line in thin}) == 1 and thin[0].get_linewidth() < mean.get_linewidth()
    assert len({line.get_color() for line in (*thin, mean)}) == 1
    [band] = figure.axes[0].collections
    pieces = [{tuple(corner) for corner in path.vertices.tolist()} for path in band.get_paths()]
    assert pieces == [{(0, 0.2), (0, 0.9)}, {(2, 0.6), (2, 1.0)}]
    told = "bold: mean of 3 runs, where each has a value; thin: each of them; band: their range"
    assert figure.get_supxlabel() == f"optimizer step\n{told}"


def test_runs_with_the_same_steps_need_no_word_on_where_they_have_values(tmp_path):
    runs = {name: ([step(0, 0.2), step(1, 0.4)], {"seed": name}) for name in "ab"}
    figure = draw_runs(_groups(tmp_path, **runs))
    assert figure.get_supxlabel() == "optimizer step\nbold: mean of 2 runs; thin: each of them; band: their range"


@pytest.mark.parametrize(
    "hole",
    [
        [step(2, 0.5, 7, **{"train/skipped_steps": 1})],  # no loss and no gradient
        [step(2, 0.5, 7, None, None)],
        [],  # its line was damaged
    ],
)
def test_no_line_leads_over_a_step_without_a_value(tmp_path, hole):
    whole = [step(number, 0.5, 7, 0.25, number + 1) for number in range(5)]
    damaged = [*whole[:2], *hole, *whole[3:]]
    figure = draw_runs(_groups(tmp_path, a=(damaged, {"lr": 1}), b=(whole, {"seed": 1}), c=(damaged, {"seed": 2})))
    alone, _, _, mean = figure.axes[3].lines
    for line in (alone, mean):
        np.testing.assert_array_equal(line.get_xydata()[:, 1], [1, 2, np.nan, 4, 5])
    [band] = figure.axes[3].collections
    assert [sorted({x for x, _ in path.vertices}) for path in band.get_paths()] == [[0, 1], [3, 4]]


def test_a_point_that_no_line_reaches_has_a_marker(tmp_path):
    records = [step(0, 0.1), step(1, None), step(2, 0.2), step(3, 0.3), step(4, None), step(5, 0.4)]
    [line] = draw_runs(_groups(tmp_path, a=(records, {}))).axes[0].lines
    assert _marked(line) == [[0, 0.1], [5, 0.4]] and line.get_marker() == mode_style("sample_mean").marker


def test_a_run_of_one_step_is_seen_alone_and_among_others(tmp_path):
    steps = [step(number, 0.2 + number) for number in range(4)]
    groups = _groups(tmp_path, a=(steps[:1], {"seed": 1}), b=(steps, {"seed": 2}), one=(steps[2:3], {"lr": 1}))
    figure = draw_runs(groups)
    thin, _, mean, alone = figure.axes[0].lines
    assert [_marked(line) for line in (thin, mean, alone)] == [[[0, 0.2]], [[0, 0.2]], [[2, 2.2]]]
    save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


def test_runs_that_share_no_step_have_no_mean(tmp_path):
    [group] = _groups(tmp_path, a=([step(0, 0.2)], {"seed": 1}), b=([step(1, 0.4)], {"seed": 2}))
    series = group_series(group, "rollout/raw_reward")
    assert series.steps.tolist() == [0, 1]
    np.testing.assert_array_equal(series.values, [[0.2, np.nan], [np.nan, 0.4]])
    assert [_points(line) for line in draw_runs([group]).axes[0].lines] == [[[0, 0.2]], [[1, 0.4]], []]


def test_a_long_gap_takes_one_point(tmp_path):
    [group] = _groups(tmp_path, a=([step(0, 0.2), step(10**12, 0.4)], {}))
    assert group_series(group, "rollout/raw_reward").steps.tolist() == [0, 1, 10**12]


def test_modes_have_their_colours_where_they_differ(tmp_path):
    runs = {mode: ([step(0, 0.5)], {"loss_aggregation": mode}) for mode in reversed(MODES)}
    colours = [line.get_color() for line in draw_runs(_groups(tmp_path, **runs)).axes[0].lines]
    assert colours == [mode_style(mode).colour for mode in reversed(MODES)]


@pytest.mark.parametrize("name", ["a$_$b", "$x^2$", "_hidden", "50% of $USER", " ", r"back\slash_{"])
def test_a_name_is_no_formula(tmp_path, name):
    directory = write_run(tmp_path / name, [step(0, 0.5)])
    (directory / "args.json").unlink()
    figure = draw_runs(group_runs(read_runs([directory])))
    save_figure(figure, tmp_path / "a.png")
    [text] = figure.legends[0].get_texts()
    assert text.get_text() == name and not text.get_parse_math()


@pytest.mark.filterwarnings("error")
def test_characters_that_the_font_lacks_are_escaped_with_one_warning(tmp_path, caplog):
    runs = {name: ([step(0, 0.5)], {"wandb_group": name, "prompt_data": name}) for name in ("日本", "Пример", "語")}
    figure = draw_runs(_groups(tmp_path, **runs))
    save_figure(figure, tmp_path / "a.png")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        r"prompt_data = \u65e5\u672c",
        "prompt_data = Пример",
        r"prompt_data = \u8a9e",
    ]
    [message] = caplog.messages
    assert message.startswith("the figure's font lacks characters of 2 legend entries")


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, 10**30])
def test_a_running_mean_is_that_of_plain_loops(size):
    steps = [0, 1, 2, 3, 4, 7, 8, 14, 15, 17]
    values = [0.5, 2.0, float("nan"), 7.0, -1e30, 1.5, float("inf"), 3.0, 0.25, 0.5]
    expected = []
    for step_number, value in zip(steps, values, strict=True):
        places = [place for place, other in enumerate(steps) if step_number - size < other <= step_number]
        window = [values[place] for place in places if np.isfinite(values[place])]
        expected.append(sum(window) / len(window) if np.isfinite(value) else float("nan"))
    np.testing.assert_allclose(running_mean(np.array(steps), np.array(values), size), expected, rtol=1e-14)


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
