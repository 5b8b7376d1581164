"""Files that are written whole or not at all."""

import os
import stat
import threading
from pathlib import Path

import pytest

from miles.utils.errors import UserError
from miles.utils.misc import check_writable, write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a.txt"
    for content in (b"first", b"the second\n"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("method", ["write_bytes", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, method):
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, method, fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a.txt", b"old")]


@pytest.mark.parametrize("was_there", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, was_there):
    (tmp_path / "kept").mkdir()
    target, link, outer = tmp_path / "kept" / "a.txt", tmp_path / "link", tmp_path / "outer"
    if was_there:
        target.write_bytes(b"old")
    link.symlink_to("kept/a.txt")
    outer.symlink_to(link)
    write_whole(outer, b"new")
    assert link.is_symlink() and outer.is_symlink() and target.read_bytes() == b"new"
    assert list((tmp_path / "kept").iterdir()) == [target]


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_pipe_is_written_into_and_stays(tmp_path, is_linked):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    path = tmp_path / "link" if is_linked else pipe
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    check_writable(path, what="a report", example="a.json")
    write_whole(path, b"content")
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and sorted(tmp_path.iterdir()) == [tmp_path / "link", pipe]
    reader.join(timeout=30)
    assert read == [b"content"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "it is a folder; name a file in it, such as {folder}/b.json"),
        ("no/a.json", "{folder}/no is not a folder; make it first"),
        ("link", "{folder}/no is not a folder; make it first"),
        ("x" * 300 + "/a.json", "{folder}/" + "x" * 300 + " is not a folder; make it first"),
    ],
)
def test_what_cannot_be_written_is_found_before(tmp_path, name, message):
    (tmp_path / "link").symlink_to(tmp_path / "no" / "a.json")
    check_writable(tmp_path / "a.json", what="a report", example="b.json")
    with pytest.raises(UserError) as refused:
        check_writable(tmp_path / name, what="a report", example="b.json")
    assert str(refused.value) == f"a report: {message.format(folder=tmp_path)}"


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.json", "no permission to write into {folder}; name another folder"), ("pipe", "no permission to write into")],
)
def test_permissions(tmp_path, monkeypatch, name, message):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError) as refused:
        check_writable(tmp_path / name, what="a report", example="b.json")
    assert str(refused.value).startswith(f"a report: {message.format(folder=tmp_path)}")
