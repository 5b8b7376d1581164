"""Hunks are taken out of a file that has changed around them, or it is said that they are not there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.drop_in.changes import FileChange, HunkError, hunks_between, join_lines, split_lines, undo

# Few different lines, so that the same ones are in many places.
LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "    c\r\n", "d\x0ce\n"]), max_size=12)


def undone(before: bytes, after: bytes, now: bytes) -> bytes:
    return undo(hunks_between(before, after), now, where_they_were=False)


@given(LINES, LINES, st.sampled_from(["", "last without an end"]))
def test_undo_where_they_were_gives_the_bytes(old, new, last):
    before, after = ("".join([*lines, last]).encode() for lines in (old, new))
    assert undo(hunks_between(before, after), after, where_they_were=True) == before


@settings(max_examples=300)
@given(LINES, LINES, LINES)
def test_a_search_gives_the_bytes_or_says_that_it_cannot(old, new, more):
    """Whatever is put in front of the file: the places with all of their context win, or are not the only ones."""
    before, after = ("".join(["first\n", *lines, "last\n"]).encode() for lines in (old, new))
    front = "".join([*more, "------\n" * 8]).encode()  # more than the context, so that it is no neighbour
    try:
        result = undone(before, after, front + after)
    except HunkError:
        return
    assert result == front + before


@given(st.binary())
def test_lines_are_the_bytes(data):
    assert join_lines(split_lines(data)) == data


def test_only_a_line_feed_ends_a_line():
    assert split_lines(b"a\x0cb\rc\r\nd\xe2\x80\xa8e\n") == ["a\x0cb\rc\r\n", "d\u2028e\n"]


BEFORE = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\n"
AFTER = BEFORE.replace(b"four\n", b"four\nfour and a half\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"one\n", b"zero\none\n"),
        (b"one\ntwo\nthree\n", b""),
        (b"four\n", b"FOUR\n"),
        (b"five\n", b"4.75\nfive\n"),
        (b"three\nfour\n", b"3\n4\n"),
        (b"eight\n", b"eight\nnine"),
        (b"seven\neight\n", b""),
    ],
)
def test_changes_elsewhere_stay(old, new):
    assert undone(BEFORE, AFTER, AFTER.replace(old, new)) == BEFORE.replace(old, new)


@pytest.mark.parametrize(
    "now",
    [
        BEFORE,
        AFTER.replace(b"half", b"quarter"),
        AFTER.replace(b"four and a half\n", b"four and a half\r\n"),
        b"four and a half\n",
        b"x\ny\nfour and a half\nz\n",
        b"",
    ],
)
def test_lines_that_are_not_there(now):
    with pytest.raises(HunkError, match="not there as they were written, or nothing around them is") as error:
        undone(BEFORE, AFTER, now)
    assert error.value.hunk.new == ("four and a half\n",)


def test_lines_that_are_there_twice():
    with pytest.raises(HunkError, match="the same lines are elsewhere too, and which were written is not clear"):
        undone(BEFORE, AFTER, AFTER + AFTER)


def test_the_copy_with_more_of_the_context_is_taken():
    copy = b"five\nfour and a half\n"
    assert undone(BEFORE, AFTER, AFTER + copy) == BEFORE + copy


def test_equal_hunks_in_equal_surroundings_are_placed_in_order():
    block = b"keys = [\n    'masks',\n]\nrun(keys)\n\n"
    before = block + block
    after = before.replace(b"'masks',\n", b"'masks',\n    'weights',\n")
    assert undone(before, after, b"top\n" + after + b"bottom\n") == b"top\n" + before + b"bottom\n"
    one_gone = block + after[len(after) // 2 :]
    with pytest.raises(HunkError, match="not there as they were written"):
        undone(before, after, one_gone)


def test_removed_lines_come_back_between_their_neighbours():
    after = BEFORE.replace(b"four\n", b"")
    assert undone(BEFORE, after, b"zero\n" + after) == b"zero\n" + BEFORE
    with pytest.raises(HunkError):
        undone(BEFORE, after, after.replace(b"five\n", b"5\nfive\n"))


def test_the_diff_of_a_file():
    change = FileChange("a/b.py", b"one\ntwo", b"one\n2\n")
    assert change.diff() == (
        "--- a/a/b.py\n+++ b/a/b.py\n@@ -1,2 +1,2 @@\n one\n-two\n\\ No newline at end of file\n+2\n"
    )
    assert FileChange("x", None, b"new\n").diff() == "--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+new\n"
    assert FileChange("x", b"old\r\n", None).diff() == "--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\r\n"
