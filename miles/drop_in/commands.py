"""What the command line does with a checkout: look, apply, revert, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import metadata
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from miles.drop_in.apply import missing_folders, write_changes
from miles.drop_in.changes import FileChange
from miles.drop_in.checkout import Checkout, Contents
from miles.drop_in.git_status import NOT_A_REPOSITORY, uncommitted
from miles.drop_in.plan import Plan, make_plan
from miles.drop_in.record import RECORD_PATH, FileRecord, Record, read_record
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.drop_in.hosts import Host

Detect = Callable[[Checkout], "Host"]
"""Finds the host that a checkout is; see `miles.drop_in.hosts.detect_host`."""


class State(IntEnum):
    """What `check` finds; the values are exit statuses."""

    IN = 0
    NOT_IN = 1
    OTHER = 2


@dataclass(frozen=True)
class Prospect:
    """What a checkout is, and what there is to do.

    Attributes:
        checkout: as it is.
        record: what was written into it, None where nothing was.
        plan: the drop-in in it.
        changes: what brings the checkout to that, the record first; none where it is there.
    """

    checkout: Checkout
    record: Record | None
    plan: Plan
    changes: tuple[FileChange, ...]


def look(checkout: Checkout, detect: Detect) -> Prospect:
    """Compute what is to be done to a checkout, which may hold the drop-in, or an older version of it.

    Raises:
        UserError: it is no host that is known, a seam is missing, or the drop-in in it has been changed.
    """
    record = read_record(checkout)
    undone = {} if record is None else record.undone(checkout)
    without = checkout.seen_with(undone)
    plan = make_plan(detect(without), without)
    # Files of another version that this one leaves alone go back to what they were.
    targets = {**undone, **_targets(checkout, record, plan)}
    files = [FileChange(path, checkout.read_if_there(path), targets[path]) for path in sorted(targets)]
    files = [change for change in files if change.before != change.after]
    if record is not None and not files:
        return Prospect(checkout, record, plan, ())
    # The record comes first, so that a run that is killed half-way can still be reverted.
    written = _record_of(plan, targets, checkout, record).to_bytes()
    first = FileChange(RECORD_PATH, checkout.read_if_there(RECORD_PATH), written)
    return Prospect(checkout, record, plan, (first, *files))


def apply(prospect: Prospect, *, force: bool) -> None:
    """Write what `look` computed.

    Raises:
        UserError: files have uncommitted changes (not with `force`), are read-only, or writing failed.
    """
    _refuse_uncommitted(prospect.checkout, prospect.record, prospect.changes, force=force)
    write_changes(prospect.checkout, prospect.changes)


def revert(checkout: Checkout, *, force: bool) -> list[str] | None:
    """Take the drop-in out again.

    Returns:
        The files that went back to what they were; None where the drop-in was not in.

    Raises:
        UserError: the lines written have changed, or as `apply`.
    """
    record = read_record(checkout)
    if record is None:
        return None
    undone = record.undone(checkout)
    files = [FileChange(path, checkout.read_if_there(path), data) for path, data in undone.items()]
    files = [change for change in files if change.before != change.after]
    _refuse_uncommitted(checkout, record, files, force=force)
    last = FileChange(RECORD_PATH, checkout.read(RECORD_PATH), None)
    write_changes(checkout, [*files, last], folders=record.folders)
    return [change.path for change in files]


def check(checkout: Checkout, detect: Detect) -> tuple[State, str]:
    """Say whether the drop-in is in, whole and current, and how it is otherwise.

    Raises:
        UserError: the drop-in is not in, and the checkout is no host that is known.
    """
    if not checkout.exists(RECORD_PATH):
        traces = _traces(checkout, detect(checkout))
        if traces:
            return State.OTHER, f"in part: there is no {RECORD_PATH}, but traces in {', '.join(traces)}"
        return State.NOT_IN, "not in"
    try:
        prospect = look(checkout, detect)
    except UserError as error:
        return State.OTHER, f"damaged: {error}"
    if not prospect.changes:
        return State.IN, "in, whole and current"
    differ = ", ".join(change.path for change in prospect.changes if change.path != RECORD_PATH)
    return State.OTHER, (
        f"in part, or of another version: written by miles {prospect.record.version}, this is {tool_version()}, which "
        f"would write otherwise: {differ}; --apply brings them up to date"
    )


def uncommitted_note(prospect: Prospect) -> str | None:
    """Return what a person should know of the files' state in git before they apply, or None."""
    try:
        paths = _uncommitted(prospect.checkout, prospect.record, prospect.changes)
    except UserError as error:
        return str(error)
    if paths is None:
        return NOT_A_REPOSITORY
    return f"uncommitted changes, which --apply refuses without --force: {', '.join(paths)}" if paths else None


def tool_version() -> str:
    """Return the version of this package, as installed."""
    try:
        return metadata.version("miles")
    except metadata.PackageNotFoundError:
        return "not installed"


def _traces(checkout: Checkout, host: Host) -> list[str]:
    """Return the drop-in's files that are there, and the host's files that name one of them."""
    names = [PurePosixPath(path).stem.encode() for path in host.new_files]
    edited = dict.fromkeys(seam.path for seam in host.seams if checkout.exists(seam.path))
    return [
        *(path for path in host.new_files if checkout.exists(path)),
        *(path for path in edited if any(name in checkout.read(path) for name in names)),
    ]


def _targets(checkout: Checkout, record: Record | None, plan: Plan) -> dict[str, bytes | None]:
    """Return what the plan's files are to hold; a file that has its edits stays as it is."""
    known = {} if record is None else {file.path: file for file in record.files}
    targets = {}
    for change in plan.changes:
        data = checkout.read_if_there(change.path)
        is_there = change.path in known and known[change.path].has(change, data)
        targets[change.path] = data if is_there else change.after
    return targets


def _record_of(plan: Plan, targets: Contents, checkout: Checkout, earlier: Record | None) -> Record:
    folders = dict.fromkeys(earlier.folders if earlier else ())
    folders |= dict.fromkeys(missing_folders(checkout, plan.changes))
    changes = [FileChange(change.path, change.before, targets[change.path]) for change in plan.changes]
    files = tuple(FileRecord.of(change) for change in changes)
    return Record(tool_version(), plan.host.name, plan.host.layout, tuple(folders), files)


def _refuse_uncommitted(
    checkout: Checkout, record: Record | None, changes: Sequence[FileChange], *, force: bool
) -> None:
    if force:
        return
    paths = _uncommitted(checkout, record, changes)
    if paths:
        raise UserError(
            f"uncommitted changes in files to be written: {', '.join(paths)}\n"
            "  commit or stash them first, so that the change stays one that can be read, or pass --force to write "
            "into the files as they are"
        )


def _uncommitted(checkout: Checkout, record: Record | None, changes: Sequence[FileChange]) -> list[str] | None:
    """Return the files with changes that neither git nor the record has; None where git does not know."""
    paths = [
        change.path
        for change in changes
        if change.before is not None
        and change.path != RECORD_PATH
        and not (record is not None and record.is_untouched(change.path, change.before))
    ]
    return uncommitted(checkout, paths)
