"""All changes are written, or none: whichever operation fails, with what it leaves behind."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from miles.drop_in.apply import RollbackError, write_changes
from miles.drop_in.changes import FileChange
from miles.drop_in.checkout import Checkout
from miles.utils.errors import UserError
from tests.fast.drop_in.toy import STEP, make_toy, snapshot

EDIT = FileChange("pkg/a.py", b"a = 1\n", b"a = 2\n")
ADD = FileChange("new/inner/b.py", None, b"b = 1\n")
REMOVE = FileChange("pkg/c.py", b"c = 1\n", None)
CHANGES = [EDIT, ADD, REMOVE, FileChange("pkg/d.py", b"d = 1\r\n", b"d = 2\r\n")]


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "pkg").mkdir()
    for change in CHANGES:
        if change.before is not None:
            (tmp_path / change.path).write_bytes(change.before)
    (tmp_path / "pkg/a.py").chmod(0o754)
    (tmp_path / "pkg/c.py").chmod(0o600)
    return Checkout(tmp_path)


class Failing:
    """Stand-in for a function that fails the nth time it is called, and from then on if `forever`."""

    def __init__(self, function, nth, error, *, forever=False):
        self.function, self.nth, self.error, self.forever, self.calls = function, nth, error, forever, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.nth or (self.forever and self.calls > self.nth):
            raise self.error
        return self.function(*args, **kwargs)


def test_writes_adds_and_removes_with_the_modes_kept(checkout):
    write_changes(checkout, CHANGES)
    after = snapshot(checkout.root)
    assert {path: data for path, (_, data) in after.items()} == {
        "new": None,
        "new/inner": None,
        "new/inner/b.py": b"b = 1\n",
        "pkg": None,
        "pkg/a.py": b"a = 2\n",
        "pkg/d.py": b"d = 2\r\n",
    }
    assert stat.S_IMODE(after["pkg/a.py"][0]) == 0o754
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(after["new/inner/b.py"][0]) == 0o666 & ~umask


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_is_kept(checkout):
    os.chown(checkout.locate("pkg/a.py"), 1234, 2345)
    write_changes(checkout, [EDIT])
    status = checkout.locate("pkg/a.py").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 2345, 0o754)


def test_a_hard_link_elsewhere_is_not_written_through(checkout, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "a.py"
    os.link(checkout.locate("pkg/a.py"), elsewhere)
    write_changes(checkout, [EDIT])
    assert elsewhere.read_bytes() == b"a = 1\n"


def test_a_link_inside_stays_a_link(checkout):
    (checkout.root / "link.py").symlink_to("pkg/a.py")
    write_changes(checkout, [FileChange("link.py", b"a = 1\n", b"a = 2\n")])
    assert (checkout.root / "link.py").is_symlink()
    assert (checkout.root / "pkg/a.py").read_bytes() == b"a = 2\n"


OPERATIONS = [
    (os, "replace", 3),  # two edits and a new file
    (Path, "unlink", 1),  # the file that is removed
    (shutil, "copy2", 5),  # two copies of each edited file, one of the removed one
    (Path, "write_bytes", 3),
    (Path, "mkdir", 2),
]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"]
)
@pytest.mark.parametrize(
    ("owner", "name", "nth"),
    [(owner, name, nth) for owner, name, times in OPERATIONS for nth in range(1, times + 1)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_failure_on_the_way_leaves_everything_as_it_was(checkout, monkeypatch, owner, name, nth, error):
    before = snapshot(checkout.root)
    failing = Failing(getattr(owner, name), nth, error)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: failing(*args, **kwargs))
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError) as raised:
        write_changes(checkout, CHANGES)
    monkeypatch.undo()
    assert failing.calls >= nth
    assert snapshot(checkout.root) == before
    if isinstance(error, OSError):
        assert raised.match(r"cannot write .*: No space left on device; every file is as it was")


def test_a_failure_to_tidy_up_afterwards_does_no_harm(checkout, monkeypatch):
    failing = Failing(Path.unlink, 2, OSError(5, "Input/output error"), forever=True)
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: failing(*args, **kwargs))
    write_changes(checkout, CHANGES)
    monkeypatch.undo()
    assert (checkout.root / "pkg/d.py").read_bytes() == b"d = 2\r\n"
    assert (checkout.root / "pkg/.d.py.drop-in-old").read_bytes() == b"d = 1\r\n"


def test_a_folder_that_cannot_be_made(checkout):
    (checkout.root / "new").write_text("a file\n")
    before = snapshot(checkout.root)
    with pytest.raises(
        UserError, match=r"cannot write .*new.*: (Not a directory|File exists); every file is as it was"
    ):
        write_changes(checkout, CHANGES)
    assert snapshot(checkout.root) == before


def test_the_way_back_fails_too(checkout, monkeypatch):
    """Nothing is lost: the old bytes stay beside the file, and the message names them."""
    monkeypatch.setattr(os, "replace", Failing(os.replace, 2, OSError(5, "Input/output error"), forever=True))
    with pytest.raises(RollbackError) as error:
        write_changes(checkout, CHANGES)
    monkeypatch.undo()
    old = checkout.root / "pkg" / ".a.py.drop-in-old"
    assert f"these could not be put back: {checkout.root}/pkg/a.py (its old bytes: {old})" in str(error.value)
    assert old.read_bytes() == b"a = 1\n"
    with pytest.raises(
        UserError, match=r"left over from a run that was killed: .*\.a\.py\.drop-in-old, .*delete these"
    ):
        write_changes(checkout, CHANGES)


def test_a_read_only_file_in_the_middle_is_refused_before_anything(checkout):
    """By its mode, since the tests may run as root, and no mode stops root."""
    checkout.locate("pkg/c.py").chmod(0o444)
    before = snapshot(checkout.root)
    with pytest.raises(
        UserError, match=r"read-only, so nothing is written: pkg/c\.py; make them writable with chmod u\+w"
    ):
        write_changes(checkout, CHANGES)
    assert snapshot(checkout.root) == before


@pytest.mark.parametrize("path", ["pkg/d.py", "new/inner/b.py"])
def test_a_file_that_has_changed_meanwhile(checkout, path):
    (checkout.root / path).parent.mkdir(parents=True, exist_ok=True)
    (checkout.root / path).write_bytes(b"other\n")
    before = snapshot(checkout.root)
    with pytest.raises(UserError, match=f"{path} has changed meanwhile; run the same command again"):
        write_changes(checkout, CHANGES)
    assert snapshot(checkout.root) == before


@pytest.mark.parametrize("path", ["../outside.py", "out/a.py"])
def test_nothing_is_written_outside(checkout, tmp_path_factory, path):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "a.py").write_bytes(b"a = 1\n")
    (checkout.root / "out").symlink_to(outside)
    before = snapshot(checkout.root)
    for old in (None, b"a = 1\n"):
        with pytest.raises(UserError, match=r"only files inside the checkout|link out of the checkout"):
            write_changes(checkout, [EDIT, FileChange(path, old, b"a = 2\n")])
    assert snapshot(checkout.root) == before
    assert (outside / "a.py").read_bytes() == b"a = 1\n"


def test_empty_folders_are_removed_and_others_stay(checkout):
    write_changes(checkout, [ADD])
    (checkout.root / "new" / "mine.py").write_text("")
    write_changes(checkout, [FileChange(ADD.path, ADD.after, None)], folders=["new", "new/inner", "gone"])
    assert [path.name for path in (checkout.root / "new").iterdir()] == ["mine.py"]


class TestCommand:
    """The same through the command line, where the record is one of the files."""

    def test_a_read_only_file(self, toy, drop_in, capsys):
        (toy / "toy/step.py").chmod(0o444)
        before = snapshot(toy)
        assert drop_in(toy, "--apply", "--force") == 2
        assert "read-only, so nothing is written: toy/step.py; make them writable" in capsys.readouterr().err
        assert snapshot(toy) == before

    @pytest.mark.parametrize("nth", [1, 2, 3, 4])
    def test_a_failure_at_each_file(self, toy, drop_in, monkeypatch, nth):
        before = snapshot(toy)
        monkeypatch.setattr(os, "replace", Failing(os.replace, nth, OSError(5, "Input/output error")))
        assert drop_in(toy, "--apply") == 2
        assert snapshot(toy) == before
        monkeypatch.undo()
        assert drop_in(toy, "--apply") == 0
        applied = snapshot(toy)
        monkeypatch.setattr(os, "replace", Failing(os.replace, min(nth, 2), OSError(5, "Input/output error")))
        assert drop_in(toy, "--revert") == 2
        assert snapshot(toy) == applied

    @pytest.mark.parametrize("nth", [1, 2, 3, 4])
    def test_a_run_that_is_killed_can_be_reverted_and_finished(self, toy, drop_in, monkeypatch, nth):
        """Killed before the nth file: no way back is taken and nothing is tidied up."""
        before = snapshot(toy)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", Failing(os.replace, nth, SystemExit()))
            patch.setattr("miles.drop_in.apply._put_back", lambda item: True)
            patch.setattr("miles.drop_in.apply._discard", lambda staged: None)
            patch.setattr(Path, "rmdir", lambda path: None)
            with pytest.raises(SystemExit):
                drop_in(toy, "--apply")
        assert drop_in(toy, "--apply") == 2  # what is left over
        for path in toy.rglob(".*.drop-in-*"):
            path.unlink()
        assert drop_in(toy, "--check") == (1 if nth == 1 else 2)
        for action in ("--revert", "--apply"):
            assert drop_in(toy, action) == 0
        assert drop_in(toy, "--check") == 0
        assert drop_in(toy, "--revert") == 0
        for folder in ("toy/loss/inner", "toy/loss"):
            if nth == 1 and (toy / folder).exists():  # made before there was a record of it
                (toy / folder).rmdir()
        assert snapshot(toy) == before

    @pytest.mark.parametrize("mode", [0o755, 0o600, 0o664])
    def test_modes_stay(self, tmp_path, drop_in, mode):
        folder = make_toy(tmp_path)
        (folder / "toy/step.py").chmod(mode)
        before = snapshot(folder)
        drop_in(folder, "--apply")
        assert stat.S_IMODE((folder / "toy/step.py").stat().st_mode) == mode
        drop_in(folder, "--revert")
        assert snapshot(folder) == before

    @pytest.mark.parametrize("mark", [b"", "\ufeff".encode()], ids=["no mark", "byte-order mark"])
    @pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
    @pytest.mark.parametrize("last", ["", "\n"], ids=["no last ending", "last ending"])
    def test_line_endings_and_the_byte_order_mark_stay(self, tmp_path, drop_in, mark, ending, last):
        step = mark + (STEP.rstrip("\n") + last).replace("\n", ending).encode()
        folder = make_toy(tmp_path, step=step)
        before = snapshot(folder)
        assert drop_in(folder, "--apply") == 0
        expected = step.replace(b'"masks"]', b'"masks", "weights"]').replace(
            b"total = scale", b"total = choose(scale)"
        )
        assert (folder / "toy/step.py").read_bytes() == expected
        assert drop_in(folder, "--check") == 0
        assert drop_in(folder, "--revert") == 0
        assert snapshot(folder) == before

    def test_a_statement_that_is_put_in_has_the_endings_of_its_file(self, tmp_path, drop_in):
        from tests.fast.drop_in.toy import OPTIONS

        folder = make_toy(tmp_path, options=OPTIONS.replace("\n", "\r\n").encode())
        before = snapshot(folder)
        assert drop_in(folder, "--apply") == 0
        data = (folder / "toy/options.py").read_bytes()
        assert b'    parser.add_argument("--mode")\r\n' in data
        assert data.count(b"\n") == data.count(b"\r\n")
        assert drop_in(folder, "--revert") == 0
        assert snapshot(folder) == before

    def test_links_out_of_the_checkout_are_not_followed(self, toy, drop_in, tmp_path, capsys):
        outside = tmp_path / "outside"
        outside.mkdir()
        (toy / "toy/step.py").rename(outside / "step.py")
        (toy / "toy/step.py").symlink_to(outside / "step.py")
        assert drop_in(toy, "--apply", "--force") == 2
        assert "toy/step.py is reached through a link out of the checkout" in capsys.readouterr().err
        assert (outside / "step.py").read_text() == STEP

    def test_a_record_cannot_lead_out_of_the_checkout(self, toy, drop_in, tmp_path, capsys):
        (tmp_path / "victim.py").write_text("x = 1\n")
        drop_in(toy, "--apply")
        record = toy / ".miles-drop-in.json"
        record.write_text(record.read_text().replace('"toy/step.py"', '"../victim.py"'))
        for action in ("--revert", "--apply"):
            assert drop_in(toy, action, "--force") == 2
            assert "only files inside the checkout are touched" in capsys.readouterr().err
        assert (tmp_path / "victim.py").read_text() == "x = 1\n"
