"""What tells that a checkout has the drop-in although its record is gone, and how a person gets out of that."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from miles.drop_in.checkout import Checkout
from miles.drop_in.record import RECORD_PATH
from miles.drop_in.seams.base import ADAPTER
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.drop_in.hosts import Host

_NAMES_ADAPTER = re.compile(rb"^[^#\n]*\b%s\b" % ADAPTER.encode(), re.MULTILINE)
"""A line that names the adapter before any comment: an import or a call of it."""


class MissingRecordError(UserError):
    """The drop-in, or a part of it, is in a checkout without its record."""

    def __init__(self, checkout: Checkout, host: Host, traces: list[str]) -> None:
        edited, added = edited_files(checkout, host), " ".join(host.new_files)
        super().__init__(
            f"there is no {RECORD_PATH}, but traces in {', '.join(traces)}; nothing can be added or taken out without "
            "the record of what was written\n"
            f"  to recover, put the record back: git restore {RECORD_PATH}, or from the commit that has it: "
            f"git checkout COMMIT -- {RECORD_PATH}\n"
            f"  or take the drop-in out with git: git restore {' '.join(edited)}, or from the commit before it: git "
            f"checkout COMMIT -- (the same files), which takes every later change of theirs back too; and delete "
            f"{added}, or move away what is your own there\n"
            "  lines that you wrote by hand, for --skip, are yours to take out, or name their seams with --skip"
        )


def added_files(checkout: Checkout, host: Host) -> list[str]:
    """Return those of the files which the drop-in adds that are there."""
    return [path for path in host.new_files if checkout.exists(path)]


def edited_files(checkout: Checkout, host: Host) -> list[str]:
    """Return the host's files that have seams, in order."""
    return list(dict.fromkeys(seam.path for seam in host.seams if checkout.exists(seam.path)))


def find_traces(checkout: Checkout, host: Host) -> list[str]:
    """Return the drop-in's files that are there, and the host's files that import or call the adapter."""
    calling = [path for path in edited_files(checkout, host) if _NAMES_ADAPTER.search(checkout.read(path))]
    return [*added_files(checkout, host), *calling]
