"""How the commands end: their exit status, and what is printed when."""

import errno
import io

import pytest

from miles.utils.command_line import run_tool
from miles.utils.errors import UserError


def test_what_is_printed_comes_before_the_error(capsys):
    def work():
        print("half of it")
        raise UserError("no disk")

    assert run_tool(work) == 2
    assert capsys.readouterr() == ("half of it\n", "error: no disk\n")


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (UserError("x"), 2), (None, 0)])
def test_statuses(capsys, error, status):
    def work():
        print("done")
        if error is not None:
            raise error

    assert run_tool(work) == status
    assert capsys.readouterr().out == "done\n"


def test_other_ends_pass_and_print_what_there_is(capsys):
    def work():
        print("usage")
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_tool(work)
    assert capsys.readouterr().out == "usage\n"


class Broken(io.TextIOWrapper):
    """A standard output that fails when it is flushed, over a file of the test's own."""

    def __init__(self, path, error):
        self.error = None
        super().__init__(path.open("wb"))
        self.error = error

    def flush(self):
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_an_output_that_cannot_be_written(tmp_path, monkeypatch, capsys, number):
    error = OSError(number, "Why not")
    broken = Broken(tmp_path / "out", error)
    monkeypatch.setattr("sys.stdout", broken)
    done = []

    def work():
        print("text")
        done.append("work")

    status = run_tool(work)
    broken.error = None
    monkeypatch.undo()
    assert done == ["work"]
    if number == errno.EPIPE:
        assert (status, capsys.readouterr().err) == (0, "")
    else:
        assert (status, capsys.readouterr().err) == (2, "error: the standard output cannot be written: Why not\n")


def test_no_output_at_all(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert run_tool(lambda: print("text")) == 0


def test_characters_that_the_output_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run_tool(lambda: print("é")) == 0
    assert raw.getvalue() == b"\\xe9\n"
