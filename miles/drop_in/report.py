"""What the command line prints."""

from __future__ import annotations

from collections.abc import Iterable

from miles.drop_in.checkout import Checkout
from miles.drop_in.commands import Prospect, Reverted
from miles.drop_in.record import RECORD_PATH

_NOTHING_TO_DO = "the drop-in is in, whole and current: nothing to do"


def planned(prospect: Prospect, note: str | None) -> str:
    """Return what would be done: the host, each seam with file and line, and the diff.

    Args:
        prospect: what was computed.
        note: what a person should know of the files' state in git.
    """
    if not prospect.changes:
        return "\n".join([*_found(prospect), _NOTHING_TO_DO])
    # The edits last, where they are read: new files are long.
    shown = sorted(prospect.changes, key=lambda change: change.before is not None)
    diff = "".join(change.diff() for change in shown if change.path != RECORD_PATH)
    closing = [f"nothing is written yet; --apply writes these {len(prospect.changes)} files:", *_files(prospect)]
    return "\n".join([*_found(prospect), "", diff, *closing, *([f"note: {note}"] if note else [])])


def applied(prospect: Prospect) -> str:
    """Return what was done."""
    if not prospect.changes:
        return "\n".join([*_found(prospect), _NOTHING_TO_DO])
    written = [f"written, {len(prospect.changes)} files:", *_files(prospect)]
    closing = "read the change and commit it; --revert takes it out again, --check says whether it is whole"
    return "\n".join([*_found(prospect), *written, closing])


def reverted(checkout: Checkout, done: Reverted | None) -> str:
    """Return what was taken out; `done` is None where the drop-in was not in."""
    if done is None:
        return f"the drop-in is not in {checkout.root} (there is no {RECORD_PATH}): nothing to do"
    by_hand = f"these seams were left to you; take your own lines out by hand: {', '.join(done.skipped)}"
    return "\n".join([f"taken out of {checkout.root}:", *_indented(done.paths), *([by_hand] if done.skipped else [])])


def _found(prospect: Prospect) -> list[str]:
    host, sites = prospect.plan.host, prospect.plan.sites
    width = max((len(f"{site.path}:{site.line}") for _, site in sites), default=0)
    seams = [f"{f'{site.path}:{site.line}':{width}}  {seam.name}: {seam.purpose}" for seam, site in sites]
    return [
        f"{host.name}, layout {host.layout}, in {prospect.checkout.root}",
        "seams (lines of the files without the drop-in):",
        *_indented(seams),
        *_left(prospect),
        "new files:",
        *_indented(host.new_files),
    ]


def _left(prospect: Prospect) -> list[str]:
    """Return the seams that are left to the person, each with what to write."""
    skipped = prospect.plan.skipped
    texts = [(f"{seam.path}  {seam.name}: {seam.purpose}", f"  by hand: {seam.instructions()}") for seam in skipped]
    return ["seams left to you (--skip):", *_indented(line for pair in texts for line in pair)] if texts else []


def _files(prospect: Prospect) -> list[str]:
    notes = {RECORD_PATH: " (what --revert and --check go by)"}
    return _indented(change.path + notes.get(change.path, "") for change in prospect.changes)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
