"""Write changes to a checkout: all of them, or none."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from miles.drop_in.changes import FileChange
from miles.drop_in.checkout import Checkout
from miles.utils.errors import UserError


class RollbackError(UserError):
    """Writing failed, and so did putting files back; their old bytes are kept beside them."""


@dataclass(frozen=True)
class _Staged:
    """A change whose bytes lie beside its target, so that what is left to do is to rename.

    Attributes:
        target: the file.
        new: a file with its new bytes, None where the target is removed.
        old: a copy of what it is now, None where the target is not there.
    """

    target: Path
    new: Path | None
    old: Path | None


def write_changes(checkout: Checkout, changes: Sequence[FileChange], *, folders: Sequence[str] = ()) -> None:
    """Bring every file from its `before` to its `after`, in order.

    Before the first file changes, all new bytes and a copy of all old ones are on the disk beside their targets. What
    follows are renames, and a failure or Ctrl-C among them is followed by the renames back.

    Args:
        checkout: where the files are.
        changes: what to write; a file keeps its mode and owner.
        folders: folders to remove at the end where they are empty, the outer ones first.

    Raises:
        UserError: a file may not be written, is not what `before` says, or writing failed; all are as they were.
        RollbackError: they are not, since the renames back failed too.
    """
    _refuse_read_only(checkout, changes)
    _refuse_leftovers(checkout, changes)
    made: list[Path] = []
    staged: list[_Staged] = []
    try:
        for folder in missing_folders(checkout, changes):
            checkout.locate(folder).mkdir()
            made.append(checkout.locate(folder))
        for change in changes:
            staged.append(_stage(checkout, change))
        _put_in_place(staged)
    except RollbackError:
        raise
    except BaseException as error:
        _discard(staged)
        for path in reversed(made):
            path.rmdir()
        if isinstance(error, OSError):
            raise UserError(
                f"cannot write {error.filename or checkout.root}: {error.strerror}; every file is as it was. "
                "Fix that, and run the same command again"
            ) from error
        raise
    _discard(staged)
    for folder in reversed(folders):
        with contextlib.suppress(OSError):  # not empty: something else has moved in
            checkout.locate(folder).rmdir()


def missing_folders(checkout: Checkout, changes: Sequence[FileChange]) -> list[str]:
    """Return the folders that the new files need and that are not there, the outer ones first."""
    parents = [PurePosixPath(change.path).parents for change in changes if change.after is not None]
    folders = dict.fromkeys(folder.as_posix() for above in parents for folder in reversed(above))
    return [folder for folder in folders if folder != "." and not checkout.exists(folder)]


def _refuse_read_only(checkout: Checkout, changes: Sequence[FileChange]) -> None:
    """Refuse before anything is written; the mode counts, also for a user that it would not stop."""
    existing = [change.path for change in changes if change.before is not None]
    read_only = [path for path in existing if not checkout.mode(path) & stat.S_IWUSR]
    if read_only:
        raise UserError(
            f"read-only, so nothing is written: {', '.join(read_only)}; make them writable with chmod u+w, "
            "or find out why they are not"
        )


def _refuse_leftovers(checkout: Checkout, changes: Sequence[FileChange]) -> None:
    beside = [path for change in changes for path in _beside(checkout.locate(change.path))]
    leftovers = [str(path) for path in beside if os.path.lexists(path)]
    if leftovers:
        raise UserError(
            f"left over from a run that was killed: {', '.join(leftovers)}; see whether the files beside them are "
            "whole (drop-in-old is what a file was before), then delete these and run the same command again"
        )


def _stage(checkout: Checkout, change: FileChange) -> _Staged:
    """Write the new bytes and a copy of the old ones beside the target."""
    if checkout.read_if_there(change.path) != change.before:
        raise UserError(f"{change.path} has changed meanwhile; run the same command again")
    target = checkout.locate(change.path)
    new, old = _beside(target)
    done = _Staged(target, None if change.after is None else new, None if change.before is None else old)
    try:
        if done.old is not None:
            _copy_with_owner(target, done.old)
        if change.after is not None:
            if change.before is not None:
                _copy_with_owner(target, new)
            new.write_bytes(change.after)
    except BaseException:
        _discard([done])
        raise
    return done


def _copy_with_owner(source: Path, target: Path) -> None:
    shutil.copy2(source, target)
    status = source.stat()
    if (status.st_uid, status.st_gid) != (target.stat().st_uid, target.stat().st_gid):
        os.chown(target, status.st_uid, status.st_gid)
        os.chmod(target, stat.S_IMODE(status.st_mode))  # chown clears set-id bits


def _put_in_place(staged: Sequence[_Staged]) -> None:
    """Rename everything into place, and everything back if that fails."""
    begun: list[_Staged] = []
    try:
        for item in staged:
            begun.append(item)
            if item.new is None:
                item.target.unlink()
            else:
                os.replace(item.new, item.target)
    except BaseException as error:
        lost = [item for item in reversed(begun) if not _put_back(item)]
        if lost:
            kept = ", ".join(f"{item.target} (its old bytes: {item.old})" for item in lost)
            raise RollbackError(f"writing failed ({error}), and these could not be put back: {kept}") from error
        raise


def _put_back(item: _Staged) -> bool:
    """Undo one rename; say whether that worked."""
    try:
        if item.old is not None:
            os.replace(item.old, item.target)
        else:
            item.target.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _discard(staged: Sequence[_Staged]) -> None:
    """Remove what lies beside the targets; what cannot be removed does no harm, and the next run names it."""
    for item in staged:
        for path in (item.new, item.old):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def _beside(target: Path) -> tuple[Path, Path]:
    """Return where the new and the old bytes of a file lie while it is written."""
    return target.with_name(f".{target.name}.drop-in-new"), target.with_name(f".{target.name}.drop-in-old")
