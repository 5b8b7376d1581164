"""What the command line does with a checkout: look, apply, revert, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import metadata
from typing import TYPE_CHECKING

from miles.drop_in.apply import missing_folders, write_changes
from miles.drop_in.changes import FileChange
from miles.drop_in.checkout import Checkout, Contents
from miles.drop_in.git_status import NOT_A_REPOSITORY, uncommitted
from miles.drop_in.plan import Plan, SeamsError, make_plan
from miles.drop_in.record import RECORD_PATH, FileRecord, Record, read_record
from miles.drop_in.traces import MissingRecordError, added_files, find_traces
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


@dataclass(frozen=True)
class Reverted:
    """What `revert` took out.

    Attributes:
        paths: the files that went back to what they were.
        skipped: names of the seams that were left to the person, whose lines are still there.
    """

    paths: tuple[str, ...]
    skipped: tuple[str, ...]


def look(checkout: Checkout, detect: Detect, *, skip: Sequence[str] = ()) -> Prospect:
    """Compute what is to be done to a checkout, which may hold the drop-in, or an older version of it.

    Args:
        checkout: the checkout.
        detect: finds its host.
        skip: names of seams that are left to the person, besides those that were before.

    Raises:
        UserError: it is no host that is known, a seam is missing, or the drop-in in it has been changed.
    """
    record = read_record(checkout)
    undone = {} if record is None else record.undone(checkout)
    without = checkout.seen_with(undone)
    plan = _plan(without, detect(without), record, skip)
    # Files of another version that this one leaves alone go back to what they were.
    targets = {**undone, **_targets(checkout, record, plan)}
    files = [FileChange(path, checkout.read_if_there(path), targets[path]) for path in sorted(targets)]
    files = [change for change in files if change.before != change.after]
    if record is not None and not files and _skipped(plan) <= set(record.skipped):
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


def revert(checkout: Checkout, detect: Detect, *, force: bool) -> Reverted | None:
    """Take the drop-in out again.

    Returns:
        What was taken out; None where the drop-in was not in.

    Raises:
        UserError: the lines written have changed, the record is missing while they are there, the checkout has no
            record and is no host that is known, or as `apply`.
    """
    record = read_record(checkout)
    if record is None:
        host = detect(checkout)
        traces = find_traces(checkout, host)
        if traces:
            raise MissingRecordError(checkout, host, traces)
        return None
    undone = record.undone(checkout)
    files = [FileChange(path, checkout.read_if_there(path), data) for path, data in undone.items()]
    files = [change for change in files if change.before != change.after]
    _refuse_uncommitted(checkout, record, files, force=force)
    last = FileChange(RECORD_PATH, checkout.read(RECORD_PATH), None)
    write_changes(checkout, [*files, last], folders=record.folders)
    return Reverted(tuple(change.path for change in files), record.skipped)


def check(checkout: Checkout, detect: Detect) -> tuple[State, str]:
    """Say whether the drop-in is in, whole and current, and how it is otherwise.

    Raises:
        UserError: the drop-in is not in, and the checkout is no host that is known.
    """
    if not checkout.exists(RECORD_PATH):
        host = detect(checkout)
        traces = find_traces(checkout, host)
        if traces:
            return State.OTHER, f"in part: {MissingRecordError(checkout, host, traces)}"
        return State.NOT_IN, "not in"
    try:
        prospect = look(checkout, detect)
    except UserError as error:
        return State.OTHER, f"damaged: {error}"
    if not prospect.changes:
        by_hand = ", ".join(f"{seam.name} ({seam.path})" for seam in prospect.plan.skipped)
        return State.IN, "in, whole and current" + (f"; by hand, and not checked: {by_hand}" if by_hand else "")
    assert prospect.record is not None  # its file is there
    return State.OTHER, _how_it_differs(prospect, prospect.record)


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


def _plan(without: Checkout, host: Host, record: Record | None, skip: Sequence[str]) -> Plan:
    """Make the plan; where there is no record, see first whether the drop-in is in all the same."""
    if record is not None:
        known = [name for name in record.skipped if any(seam.name == name for seam in host.seams)]
        return make_plan(host, without, skip=[*known, *skip])
    if added_files(without, host):
        raise MissingRecordError(without, host, find_traces(without, host))
    try:
        return make_plan(host, without, skip=skip)
    except SeamsError as error:
        by_hand = {seam.path for seam in host.seams if seam.name in skip}
        traces = [path for path in find_traces(without, host) if path not in by_hand]
        if not traces:
            raise
        raise UserError(f"{error}\n{MissingRecordError(without, host, traces)}") from error


def _skipped(plan: Plan) -> set[str]:
    return {seam.name for seam in plan.skipped}


def _how_it_differs(prospect: Prospect, record: Record) -> str:
    """Return which files are not as this version has them, in words."""
    files = {file.path: file for file in record.files}
    changes = [change for change in prospect.changes if change.path != RECORD_PATH]
    undone = [
        change.path for change in changes if change.path in files and files[change.path].is_as_before(change.before)
    ]
    others = [change.path for change in changes if change.path not in undone]
    versions = f"written by miles {record.version}, this is {tool_version()}"
    parts = [
        *([f"in part: these are as before the drop-in: {', '.join(undone)}"] if undone else []),
        *([f"of another version ({versions}), which would write otherwise: {', '.join(others)}"] if others else []),
    ]
    return f"{'; '.join(parts)}; --apply brings them up to date"


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
    skipped = tuple(dict.fromkeys(seam.name for seam in plan.skipped))
    return Record(tool_version(), plan.host.name, plan.host.layout, tuple(folders), files, skipped)


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
