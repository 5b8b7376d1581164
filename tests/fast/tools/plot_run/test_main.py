"""The command line of `plot_run`."""

import subprocess
import sys

import pytest

from miles.tools.plot_run.__main__ import main
from tests.fast.tools.plot_run.folders import step, write_run

STEPS = [step(0, 0.5, 7.0, 0.25, 2.0), step(1, 0.75, 6.0, 0.5, 1.0)]


@pytest.fixture
def runs(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    modes = ("sample_mean", "token_mean")
    return [str(write_run(tmp_path / mode, STEPS, loss_aggregation=mode)) for mode in modes]


def test_a_figure_and_a_table(runs, tmp_path, capsys):
    output = tmp_path / "out.png"
    assert main([*runs, "--output", str(output), "--smooth", "2"]) == 0
    out, err = capsys.readouterr()
    assert output.read_bytes().startswith(b"\x89PNG")
    assert out.endswith(f"figure: {output}\n") and "token_mean" in out and err == ""


def test_the_command_itself(runs, tmp_path):
    command = [sys.executable, "-m", "miles.tools.plot_run", *runs, "absent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: absent is not a folder; expected one that train.py wrote (--output-dir)\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--smooth", "0"], "error: --smooth must be at least 1, got 0\n"),
        (["--output", "a.svg"], "error: a figure is written as .png, got 'a.svg'; name it a.png\n"),
        (
            ["--output", "absent/a.png"],
            "error: cannot write figure absent/a.png: absent is not a folder; make it first\n",
        ),
    ],
)
def test_bad_options(runs, options, message, capsys):
    assert main([*runs, *options]) == 2
    assert capsys.readouterr() == ("", message)


def test_without_matplotlib_nothing_is_read(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert main(["absent"]) == 2
    assert 'pip install -e ".[plot]"' in capsys.readouterr().err


def test_a_damaged_file_is_one_line_and_exit_status_2(runs, tmp_path, capsys):
    (tmp_path / "token_mean" / "metrics.jsonl").write_text("garbled\n")
    assert main(runs) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {tmp_path / 'token_mean' / 'metrics.jsonl'} line 1 is damaged: ")


def test_a_name_too_long_and_a_link_to_itself_are_one_line(runs, tmp_path, capsys):
    (tmp_path / "looped").mkdir()
    (tmp_path / "looped" / "metrics.jsonl").symlink_to("metrics.jsonl")
    for directory, message in (("a" * 300, "is not a folder"), (str(tmp_path / "looped"), "has no metrics.jsonl")):
        assert main([*runs, directory]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err


def test_stopped_by_a_person(runs, monkeypatch, capsys):
    def stop(directories):
        raise KeyboardInterrupt

    monkeypatch.setattr("miles.tools.plot_run.runs.read_runs", stop)
    assert main(runs) == 130
    assert capsys.readouterr() == ("", "")


def test_a_run_that_has_just_begun_is_a_warning(runs, tmp_path, capsys):
    begun = write_run(tmp_path / "begun", [])
    assert main([*runs, str(begun), "--output", str(tmp_path / "out.png")]) == 0
    assert "begun/metrics.jsonl has no step yet; the run is left out" in capsys.readouterr().err


def test_the_picture_replaces_nothing_that_is_drawn(runs, tmp_path, capsys):
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "token_mean" / "metrics.jsonl")
    before = link.read_text()
    assert main([*runs, "--output", str(link)]) == 2
    assert "which it would replace" in capsys.readouterr().err
    assert link.read_text() == before
