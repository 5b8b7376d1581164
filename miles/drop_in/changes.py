"""What happens to one file, as lines: the difference to read, and hunks that can be taken out again later."""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONTEXT = 3
"""Unchanged lines kept on each side of a hunk."""


@dataclass(frozen=True)
class FileChange:
    """One file before and after.

    Attributes:
        path: posix, relative to the checkout.
        before: its bytes, None where it is not there.
        after: its bytes, None where it is removed.
    """

    path: str
    before: bytes | None
    after: bytes | None

    def diff(self) -> str:
        """Return the unified diff, in the form that `git apply` and `patch -p1` take."""
        old, new = split_lines(self.before or b""), split_lines(self.after or b"")
        source = "/dev/null" if self.before is None else f"a/{self.path}"
        target = "/dev/null" if self.after is None else f"b/{self.path}"
        lines = difflib.unified_diff(old, new, source, target, n=CONTEXT)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


@dataclass(frozen=True)
class Hunk:
    """Lines that replaced others.

    Attributes:
        line: where `new` starts in the changed file, from 0.
        above: up to `CONTEXT` unchanged lines before it.
        old: the lines that were there.
        new: the lines that are there now.
        below: up to `CONTEXT` unchanged lines after it.
    """

    line: int
    above: tuple[str, ...]
    old: tuple[str, ...]
    new: tuple[str, ...]
    below: tuple[str, ...]


class HunkError(ValueError):
    """A hunk's lines are not in the file, or it is not clear where.

    Attributes:
        hunk: the hunk.
        reason: which of the two, in words.
    """

    def __init__(self, hunk: Hunk, reason: str) -> None:
        super().__init__(reason)
        self.hunk = hunk
        self.reason = reason


def split_lines(data: bytes) -> list[str]:
    """Return the lines with their own endings; only a line feed ends one, so that joining them gives the bytes."""
    return [line.decode("utf-8", "surrogateescape") for line in io.BytesIO(data)]


def join_lines(lines: Sequence[str]) -> bytes:
    """Return the bytes that `split_lines` takes apart."""
    return "".join(lines).encode("utf-8", "surrogateescape")


def hunks_between(before: bytes, after: bytes) -> tuple[Hunk, ...]:
    """Return the hunks that make `after` of `before`, in order."""
    old, new = split_lines(before), split_lines(after)
    blocks = difflib.SequenceMatcher(None, old, new).get_opcodes()
    return tuple(
        Hunk(
            line=first,
            above=tuple(new[max(first - CONTEXT, 0) : first]),
            old=tuple(old[start:end]),
            new=tuple(new[first:last]),
            below=tuple(new[last : last + CONTEXT]),
        )
        for tag, start, end, first, last in blocks
        if tag != "equal"
    )


def undo(hunks: Sequence[Hunk], data: bytes, *, where_they_were: bool) -> bytes:
    """Return the file with the lines from before in place of the hunks.

    Args:
        hunks: in order.
        data: the file, with the hunks in it.
        where_they_were: the file is as it was when the hunks were made. Otherwise it has changed around them, and they
            are looked for.

    Raises:
        HunkError: a hunk is not in the file, or the places of the hunks are not clear.
    """
    lines = split_lines(data)
    starts = [hunk.line for hunk in hunks] if where_they_were else _starts(hunks, lines)
    for hunk, start in reversed(list(zip(hunks, starts, strict=True))):
        lines[start : start + len(hunk.new)] = hunk.old
    return join_lines(lines)


@dataclass(frozen=True)
class _Way:
    """The best way to place the hunks so far: its score, their starts, and a hunk that could as well be elsewhere."""

    score: int
    starts: tuple[int, ...]
    unclear: Hunk | None


def _starts(hunks: Sequence[Hunk], lines: list[str]) -> tuple[int, ...]:
    """Return where each hunk starts: the one way to place all of them in order with the most of the context around."""
    ways = {0: _Way(0, (), None)}  # by the line where the last hunk so far ends
    last: Hunk | None = None
    for hunk in hunks:
        longer = {}
        for start, score in _places(hunk, lines):
            before = _best([way for end, way in ways.items() if end <= start], last)
            if before is not None:
                way = _Way(before.score + score, (*before.starts, start), before.unclear)
                longer[start + len(hunk.new)] = way
        if not longer:
            raise HunkError(hunk, "they are not there as they were written, or nothing around them is")
        ways, last = longer, hunk
    best = _best(list(ways.values()), last)
    assert best is not None  # there is a way, or the loop has raised
    if best.unclear is not None:
        raise HunkError(best.unclear, "the same lines are elsewhere too, and which were written is not clear")
    return best.starts


def _best(ways: Sequence[_Way], last: Hunk | None) -> _Way | None:
    """Return the way with the highest score; where several have it, the last hunk's place is not clear."""
    top = max((way.score for way in ways), default=None)
    equal = [way for way in ways if way.score == top]
    if len(equal) > 1:
        return dataclasses.replace(equal[0], unclear=last)
    return equal[0] if equal else None


def _places(hunk: Hunk, lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield each line at which the hunk may start, with the number of its context lines found near there.

    Blank lines are no evidence. At least one line of context is needed, where the hunk has any. A hunk without lines
    of its own (they were removed) needs the ones next to it, both.
    """
    size, near = len(hunk.new), 2 * CONTEXT
    needed = 1 if any(line.strip() for line in (*hunk.above, *hunk.below)) else 0
    for start in range(len(lines) - size + 1):
        end = start + size
        if tuple(lines[start:end]) != hunk.new:
            continue
        if not size and (tuple(lines[start - 1 : start]), tuple(lines[end : end + 1])) != (
            hunk.above[-1:],
            hunk.below[:1],
        ):
            continue
        above, below = lines[max(start - near, 0) : start], lines[end : end + near]
        score = sum(line in above for line in hunk.above if line.strip())
        score += sum(line in below for line in hunk.below if line.strip())
        if score >= needed:
            yield start, score
