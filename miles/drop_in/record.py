"""The record of what was written into a checkout, kept there: what `--revert` and `--check` go by.

It holds hunks, not files, so that it is small, can be read and committed with the rest, and lets go of nothing that
was changed elsewhere in the same files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from miles.drop_in.changes import FileChange, Hunk, HunkError, hunks_between, undo
from miles.drop_in.checkout import Checkout
from miles.utils.errors import UserError

RECORD_PATH = ".miles-drop-in.json"
_FORMAT = 1


class DamagedError(UserError):
    """The drop-in is not in the checkout as its record says."""


@dataclass(frozen=True)
class FileRecord:
    """What was done to one file.

    Attributes:
        path: posix, relative to the checkout.
        before: SHA-256 of its bytes, None where it was not there.
        after: SHA-256 of its bytes with the drop-in.
        hunks: the edits; none for a new file.
    """

    path: str
    before: str | None
    after: str
    hunks: tuple[Hunk, ...]

    @classmethod
    def of(cls, change: FileChange) -> FileRecord:
        """Return the record of a change that writes a file."""
        assert change.after is not None, f"{change.path}: the drop-in removes no file"
        if change.before is None:
            return cls(change.path, None, _digest(change.after), ())
        hunks = hunks_between(change.before, change.after)
        return cls(change.path, _digest(change.before), _digest(change.after), hunks)

    def has(self, change: FileChange, data: bytes | None) -> bool:
        """Say whether a file has what a change writes, also where other lines of it have moved the edits a little.

        Args:
            change: what would be written now, into the file without the drop-in.
            data: what the file holds, from which `undone` has taken the edits out.
        """
        if data is None or _digest(data) == self.before or change.before is None:
            return data == change.after
        return _edits(self.hunks) == _edits(FileRecord.of(change).hunks)

    def is_as_before(self, data: bytes | None) -> bool:
        """Say whether a file holds what it did before the drop-in, or is not there where it was not."""
        return (data if data is None else _digest(data)) == self.before

    def undone(self, data: bytes | None) -> bytes | None:
        """Return what the file holds without the drop-in, of what it holds now.

        Raises:
            DamagedError: that cannot be told, since the lines written have changed.
        """
        if data is None:
            if self.before is None:
                return None
            raise DamagedError(f"{self.path} is gone; put the file back")
        digest = _digest(data)
        if digest == self.before:
            return data
        if self.before is None:
            if digest == self.after:
                return None
            raise DamagedError(
                f"{self.path} is a file of the drop-in and has been changed; keep your changes elsewhere and delete it"
            )
        try:
            return undo(self.hunks, data, where_they_were=digest == self.after)
        except HunkError as error:
            raise DamagedError(_where(self.path, error)) from error


@dataclass(frozen=True)
class Record:
    """What was written, by which version, for which host.

    Attributes:
        version: the version of this package that wrote it.
        host: the host's name.
        layout: the host's layout.
        folders: folders that were made, the outer ones first.
        files: one entry a file.
        skipped: names of the seams that are left to the person.
    """

    version: str
    host: str
    layout: str
    folders: tuple[str, ...]
    files: tuple[FileRecord, ...]
    skipped: tuple[str, ...] = ()

    def undone(self, checkout: Checkout) -> dict[str, bytes | None]:
        """Return what each file holds without the drop-in.

        Raises:
            DamagedError: the lines written have changed; it names each place.
        """
        contents, problems = {}, []
        for file in self.files:
            try:
                contents[file.path] = file.undone(checkout.read_if_there(file.path))
            except DamagedError as error:
                problems.append(str(error))
        if problems:
            raise DamagedError(_listed(f"the drop-in in {checkout.root} is not as it was written:", problems))
        return contents

    def is_untouched(self, path: str, data: bytes | None) -> bool:
        """Say whether a file holds exactly what was written, or exactly what was there before."""
        known = {file.path: (file.before, file.after) for file in self.files}
        return data is not None and _digest(data) in known.get(path, ())

    def to_bytes(self) -> bytes:
        """Return the record as it is stored."""
        fields = {"format": _FORMAT, **dataclasses.asdict(self)}
        return (json.dumps(fields, indent=1, ensure_ascii=False) + "\n").encode("utf-8")

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Read a stored record.

        Raises:
            DamagedError: it is not one that this version reads.
        """
        try:
            fields = json.loads(data)
            if fields["format"] != _FORMAT:
                raise DamagedError(
                    f"{RECORD_PATH} has format {fields['format']!r}, this version reads {_FORMAT}; "
                    "use the version of miles that wrote it"
                )
            return cls(
                version=_text(fields["version"]),
                host=_text(fields["host"]),
                layout=_text(fields["layout"]),
                folders=tuple(_text(folder) for folder in fields["folders"]),
                files=tuple(_file(entry) for entry in fields["files"]),
                skipped=tuple(_text(name) for name in fields.get("skipped", ())),
            )
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{RECORD_PATH} is not the record that --apply wrote ({error!r}); put it back from your last commit"
            ) from error


def read_record(checkout: Checkout) -> Record | None:
    """Return the record of a checkout, or None where nothing was written.

    Raises:
        DamagedError: there is one that cannot be read.
    """
    data = checkout.read_if_there(RECORD_PATH)
    return None if data is None else Record.from_bytes(data)


def _edits(hunks: Iterable[Hunk]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [(hunk.old, hunk.new) for hunk in hunks]


def _where(path: str, error: HunkError) -> str:
    lines = "".join(f"      {line.rstrip()}\n" for line in error.hunk.new or error.hunk.old)
    kind = "these lines were written" if error.hunk.new else "these lines were removed"
    return (
        f"{path}, about line {error.hunk.line + 1}: {kind}, and {error.reason}:\n{lines}"
        "    put them back as they were, or the whole file to what it was without the drop-in"
    )


def _listed(title: str, problems: Iterable[str]) -> str:
    return "\n".join([title, *(f"  {problem}" for problem in problems)])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _file(entry: Any) -> FileRecord:
    before = entry["before"]
    hunks = tuple(_hunk(hunk) for hunk in entry["hunks"])
    return FileRecord(_text(entry["path"]), before if before is None else _text(before), _text(entry["after"]), hunks)


def _hunk(entry: Any) -> Hunk:
    if not isinstance(entry["line"], int) or entry["line"] < 0:
        raise TypeError(f"expected a line number, got {entry['line']!r}")
    parts = {part: tuple(_text(line) for line in entry[part]) for part in ("above", "old", "new", "below")}
    return Hunk(line=entry["line"], **parts)
