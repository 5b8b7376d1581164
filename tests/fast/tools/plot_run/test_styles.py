"""Which line a group gets: no two the same, and what colour and dashes stand for."""

import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools.figure_style import STYLES, mode_style
from miles.tools.plot_run.runs import RunGroup
from miles.tools.plot_run.styles import DASHES, MAX_GROUPS, group_styles
from miles.utils.errors import UserError


def _group(mode, *setting):
    return RunGroup("", mode, [], setting)


def _lines(groups):
    return [(style.colour, style.dashes) for style in group_styles(groups)]


def test_a_mode_with_one_group_looks_as_everywhere():
    groups = [_group(mode) for mode in reversed(MODES)]
    assert group_styles(groups) == [mode_style(mode) for mode in reversed(MODES)]
    assert group_styles(groups[:1]) == [mode_style("constant")]


def test_colours_stand_for_modes_and_dashes_for_settings():
    groups = [_group(mode, count) for mode in MODES for count in ("30", "40")]
    assert _lines(groups) == [(mode_style(mode).colour, dashes) for mode in MODES for dashes in DASHES[:2]]
    # The setting alone decides, wherever it comes and whichever a mode lacks.
    groups = [_group("token_mean", "40"), _group("sample_mean", "30"), _group("sample_mean", "40")]
    assert [dashes for _, dashes in _lines(groups)] == [DASHES[0], DASHES[1], DASHES[0]]


def test_runs_of_unknown_mode_have_no_mode_s_colour():
    groups = [_group("token_mean", str(lr)) for lr in range(5)] + [_group(None, "run")]
    lines = _lines(groups)
    assert len(set(lines)) == 6 and lines[5][0] not in {style.colour for style in map(mode_style, MODES)}


@pytest.mark.parametrize(
    "groups",
    [
        [_group("token_mean", str(lr)) for lr in range(8)],
        [_group("token_mean", str(lr)) for lr in range(9)],
        [_group("token_mean", str(lr)) for lr in range(MAX_GROUPS)],
        [_group("token_mean", str(lr)) for lr in range(8)] + [_group("sample_mean", "0")],
        [_group(mode, str(lr)) for mode in MODES for lr in range(12)],
        [_group("token_mean", "0"), _group("of_a_later_release", "0"), _group("another", "0")],
    ],
)
def test_no_two_groups_have_one_line(groups):
    assert len(set(_lines(groups))) == len(groups)


def test_groups_of_one_mode_have_one_style_after_another(caplog):
    assert group_styles([_group("constant", str(lr)) for lr in range(7)]) == list(STYLES)
    assert not caplog.records


def test_where_dashes_run_out_a_warning_says_what_colours_mean(caplog):
    group_styles([_group("token_mean", str(lr)) for lr in range(len(DASHES) + 1)] + [_group("sample_mean", "0")])
    assert caplog.messages == ["too many settings for 7 kinds of dashes: colours stand for no modes here"]


def test_more_groups_than_lines_are_refused():
    with pytest.raises(UserError, match=r"^a figure tells 49 settings apart .* have 50; name fewer runs at once$"):
        group_styles([_group(None, str(place)) for place in range(MAX_GROUPS + 1)])
