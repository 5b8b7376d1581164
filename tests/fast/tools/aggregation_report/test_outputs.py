"""The files of the report, and its standard output: nothing that is there is lost, and no traceback is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast.tools.aggregation_report.test_bad_dumps import error_of, row, write
from tests.fast.tools.aggregation_report.test_main import REPOSITORY

COMMAND = f"{sys.executable} -m miles.tools.aggregation_report"


def shell(folder: Path, command: str) -> subprocess.CompletedProcess:
    """Run a line of bash in a folder with a dump, `a.pt`; `report` stands for the command."""
    write(folder / "a.pt", row(), row(5))
    return subprocess.run(
        ["bash", "-c", "set -o pipefail; " + command.replace("report ", f"{COMMAND} ", 1)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]},
    )


def assert_a_report(text: str) -> None:
    assert json.loads(text)["data"]["samples"] == 2


def test_folders_of_files_are_checked_before_anything_is_read(tmp_path, capsys):
    missing = f"{tmp_path}/no.pt"
    assert error_of(capsys, missing, f"--json={tmp_path}/no/a.json") == (
        f"--json {tmp_path}/no/a.json: {tmp_path}/no is not a folder; make it first"
    )
    assert f"--json {tmp_path}: it is a folder; name a file in it" in error_of(capsys, missing, f"--json={tmp_path}")
    assert "a figure is written as .png" in error_of(capsys, missing, f"--plot={tmp_path}/a.pdf")
    assert "is not a folder" in error_of(capsys, missing, f"--plot={tmp_path}/no/a.png")
    assert error_of(capsys, missing, "--plot=") == (
        "cannot write figure .: it is a folder; name a file in it, such as figure.png"
    )
    (tmp_path / "link.json").symlink_to(tmp_path / "no" / "a.json")
    assert f"{tmp_path}/no is not a folder" in error_of(capsys, missing, f"--json={tmp_path}/link.json")


@pytest.mark.parametrize(
    ("dump", "options", "message"),
    [
        ("T_0.pt", ["--json=T_0.pt"], "--json T_0.pt is one of the dumps"),
        ("T_{rollout_id}.pt", ["--json=T_0.pt"], "--json T_0.pt is one of the dumps, which it would replace"),
        ("T_0.pt", ["--json=x/../T_0.pt"], "is one of the dumps"),
        ("T_0.pt", ["--json=to_T.json"], "--json to_T.json is one of the dumps"),
        ("T_0.pt", ["--json=hard.json"], "--json hard.json is one of the dumps"),
        ("T.png", ["--plot=T.png"], "--plot T.png is one of the dumps, which it would replace; name another file"),
        ("T_0.pt", ["--json=new.png", "--plot=x/../new.png"], "--json and --plot are both x/../new.png; name two"),
    ],
)
def test_no_file_replaces_another(tmp_path, capsys, monkeypatch, dump, options, message):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    paths = [Path(write(Path(name), row(), row(2))) for name in ("T_0.pt", "T_1.pt", "T.png")]
    Path("to_T.json").symlink_to("T_0.pt")
    os.link("T_0.pt", "hard.json")
    before = [path.read_bytes() for path in paths]
    assert message in error_of(capsys, dump, *options)
    assert [path.read_bytes() for path in paths] == before and not Path("new.png").exists()


def test_links_stay_and_their_targets_are_written(tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    (tmp_path / "b.json").symlink_to("kept/c.json")
    done = shell(tmp_path, "report a.pt --json b.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "b.json").is_symlink()
    assert_a_report((tmp_path / "kept" / "c.json").read_text())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.pt", "b.json", "c.json", "kept"]


# Not /dev/stdout itself, which a fault here would replace on the machine of whoever runs this as root.
STDOUT = "ln -s /dev/fd/1 stdout"


@pytest.mark.parametrize("reader", ["", "| cat"])
def test_json_on_the_standard_output_takes_the_place_of_the_table(tmp_path, reader):
    done = shell(tmp_path, f"{STDOUT}; report a.pt --json stdout {reader}; test -L stdout")
    assert (done.returncode, done.stderr) == (0, "")
    assert_a_report(done.stdout)


@pytest.mark.parametrize("path", ["stdout", "out"])
def test_json_into_the_file_that_the_shell_opened(tmp_path, path):
    assert shell(tmp_path, f"{STDOUT}; report a.pt --json {path} > out").returncode == 0
    assert_a_report((tmp_path / "out").read_text())


def test_json_into_a_pipe(tmp_path):
    done = shell(tmp_path, "mkfifo p; cat p > b.json & report a.pt --json p; wait; test -p p")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("rollouts")
    assert_a_report((tmp_path / "b.json").read_text())


def test_a_reader_that_is_gone_loses_nothing_else(tmp_path):
    done = shell(tmp_path, "report a.pt --json b.json | true")
    assert (done.returncode, done.stderr) == (0, "")
    assert_a_report((tmp_path / "b.json").read_text())


def test_a_closed_standard_output_loses_nothing_else(tmp_path):
    done = shell(tmp_path, "report a.pt --json b.json >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert_a_report((tmp_path / "b.json").read_text())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("command", ["report a.pt --json b.json > /dev/full", "report --help > /dev/full"])
def test_a_full_standard_output(tmp_path, command):
    done = shell(tmp_path, command)
    assert done.stderr == "error: the standard output cannot be written: No space left on device\n"
    if "json" in command:
        assert done.returncode == 2
        assert_a_report((tmp_path / "b.json").read_text())


def test_help_for_a_reader_that_is_gone(tmp_path):
    done = shell(tmp_path, "report --help | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("stream", ["2> /dev/full", "2>&-"])
def test_a_standard_error_stream_that_takes_nothing(tmp_path, stream):
    write(tmp_path / "bad.pt", row(), row(loss_mask=[1]))
    done = shell(tmp_path, f"report bad.pt --skip-bad --json b.json {stream}")
    assert done.returncode == 0 and done.stdout.startswith("rollouts  ")
    assert len(json.loads((tmp_path / "b.json").read_text())["skipped"]) == 1
    done = shell(tmp_path, f"report bad.pt {stream}")
    assert (done.returncode, done.stdout) == (2, "")
