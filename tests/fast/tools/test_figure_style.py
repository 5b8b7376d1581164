"""Colours that everybody can tell apart, and figures that are written whole or not at all."""

import itertools
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools import figure_style
from miles.tools.figure_style import STYLES, check_figure_path, mode_style, new_figure, save_figure
from miles.utils.errors import UserError

SIMULATIONS = {
    "normal": np.eye(3),
    # Machado, Oliveira and Fernandes 2009, severity 1.0, on linear sRGB.
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE_XYZ = np.array([0.9505, 1.0, 1.089])


def _linear(colour):
    encoded = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def _lab(linear):
    ratios = TO_XYZ @ np.clip(linear, 0, 1) / WHITE_XYZ
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="needs the extra `plot`")


@pytest.fixture
def figure(matplotlib):
    with figure_style.figure_style():
        figure = new_figure(4, 2)
        axes = figure.subplots()
        axes.bar(range(7), range(1, 8), color=[style.colour for style in STYLES])
    return figure


def test_each_mode_has_a_style_of_its_own():
    for styles, fields in (
        ([mode_style(mode) for mode in MODES], ("colour", "marker", "dashes", "hatch")),
        (STYLES, ("colour",)),
    ):
        for field in fields:
            assert len({getattr(style, field) for style in styles}) == len(styles), field


@pytest.mark.parametrize("name", SIMULATIONS)
def test_everybody_can_tell_the_modes_apart(name):
    colours = [_lab(SIMULATIONS[name] @ _linear(style.colour)) for style in map(mode_style, MODES)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)) >= 22


def test_modes_differ_in_print_and_stand_out_from_the_page():
    linear = [_linear(style.colour) for style in map(mode_style, MODES)]
    lightness = sorted(_lab(colour)[0] for colour in linear)
    assert min(b - a for a, b in itertools.pairwise(lightness)) >= 6
    # WCAG 2.1, 1.4.11: graphics need 3 to 1. Contrast is (luminance of white + 0.05) / (of the colour + 0.05).
    assert min(1.05 / (TO_XYZ[1] @ colour + 0.05) for colour in linear) >= 3


def _png(path):
    content = Path(path).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_a_figure_is_written_with_its_colours_and_leaves_nothing_else(figure, tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = save_figure(figure, tmp_path / "a.png")
    assert _png(path) == (4 * 160, 2 * 160)
    pixels = image.open(path).convert("RGB").getcolors(100_000)
    drawn = {"#{:02x}{:02x}{:02x}".format(*colour) for count, colour in pixels if count > 100}
    assert {style.colour.lower() for style in STYLES} | {"#ffffff"} <= drawn
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]


def test_equal_figures_are_equal_files(figure, tmp_path):
    first, second = (save_figure(figure, tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second


def test_a_persons_own_settings_neither_change_a_figure_nor_are_changed(matplotlib):
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30.0, "xtick.labelsize": 30.0}):
        with figure_style.figure_style():
            figure = new_figure(3, 2)
            axes = figure.subplots()
        assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
        assert (axes.title.get_fontsize(), axes.get_xticklabels()[0].get_fontsize()) == (11.0, 10.0)
        assert matplotlib.rcParams["font.size"] == 30.0


def test_axes_of_logarithms_have_plain_numbers(matplotlib):
    with figure_style.figure_style():
        axes = new_figure(6, 3).subplots()
        axes.plot([30, 3000], [0.02, 0.02])
        axes.set(xscale="log", yscale="log")
        figure_style.label_in_plain_numbers(axes.xaxis)
        figure_style.label_in_plain_numbers(axes.yaxis)
        labels = [axes.xaxis.get_major_formatter()(value, None) for value in axes.get_xticks()]
    assert {"50", "100", "1,000", "2,000"} <= set(labels)
    assert axes.get_ylim() == pytest.approx((0.01, 0.04))


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ([5.0, 5.0], (2.5, 10)),
        # The middle is the geometric mean, 6; 4 to 9 in all spans 2.25, too little.
        ([4.0, 9.0], (3, 12)),
        # 1 to 3.61: 1.1 times 1.9 to either side of 1.9
        ([1.0, 3.61], (1 / 1.1, 3.61 * 1.1)),
        ([0.0, 5.0], (2.5, 10)),
        ([1e-200, 1e-200], (5e-201, 2e-200)),
    ],
)
def test_axes_of_logarithms_span_a_factor_of_four(matplotlib, values, limits):
    with figure_style.figure_style():
        axes = new_figure(4, 3).subplots()
        axes.plot([1, 2], values)
        axes.set(yscale="log")
        figure_style.label_in_plain_numbers(axes.yaxis)
    assert axes.get_ylim() == pytest.approx(limits)


def test_a_figure_that_nobody_could_look_at(matplotlib):
    with pytest.raises(UserError, match=r"may be 40 inches wide and high, and this one would be 10 x 41; draw fewer"):
        new_figure(10, 41)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", r"a figure is written as \.png, got '.*a\.pdf'; name it a\.png"),
        ("a", r"a figure is written as \.png, got '.*a'; name it a\.png"),
        ("absent/a.png", r"cannot write figure .*absent/a\.png: .*absent is not a folder; make it first"),
        ("", r"cannot write figure .*: it is a folder; name a file in it, such as .*figure\.png"),
        ("folder.png", r"cannot write figure .*folder\.png: it is a folder; name a file in it"),
    ],
)
def test_paths_that_cannot_be_written_are_refused_before_anything_is_computed(tmp_path, name, message):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match=message):
        check_figure_path(tmp_path / name)


def test_a_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.utils.misc.os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"a\.png: no permission to write into .*; name another folder"):
        check_figure_path(tmp_path / "a.png")


def test_a_failed_write_leaves_the_old_figure_and_no_other_file(figure, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"old")

    def fail(path, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match=r"cannot write figure .*a\.png: No space left on device"):
        save_figure(figure, tmp_path / "a.png")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a.png", b"old")]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(UserError, match=r'matplotlib, which cannot be imported .*pip install -e "\.\[plot\]"'):
        figure_style.require_matplotlib()


@pytest.mark.parametrize("module", ["miles.tools.figure_style", "miles.tools.plot_run.__main__"])
def test_importing_needs_no_heavy_library(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'matplotlib', 'PIL'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
