"""What one edit of a host file is: a named place found by structure, and the change made there."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import libcst as cst

from miles.utils.errors import UserError


class SeamError(UserError):
    """A seam was not found, or not as expected.

    Attributes:
        reason: what was found instead, one line.
        seam: the seam's name.
        path: the host file, relative to the checkout.
        looked_for: the structure that the seam looks for.
        by_hand: what a person writes instead.
    """

    def __init__(self, reason: str, *, seam: str, path: str, looked_for: str, by_hand: str) -> None:
        super().__init__(
            f"seam {seam!r} of {path}: {reason}\n  it looked for: {looked_for}\n  to do it by hand: {by_hand}"
        )
        self.reason = reason
        self.seam = seam
        self.path = path
        self.looked_for = looked_for
        self.by_hand = by_hand


@dataclass(frozen=True)
class Site:
    """Where a seam's edit goes.

    Attributes:
        path: the host file, posix, relative to the checkout.
        line: the line of the node found, from 1, in the file without the drop-in.
    """

    path: str
    line: int


class Seam(abc.ABC):
    """One place in a host file and the edit made there.

    Subclasses are small: the four texts, `find` and `edit`.

    Attributes:
        name: kebab-case, unique among the seams of a host.
        purpose: what the edit is for, one line.
        looked_for: the structure that `find` looks for (function, call, argument names), one line.
        by_hand: what a person writes instead, where `find` does not find it: what `edit` writes in this host.
        path: the host file, posix, relative to the checkout.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    looked_for: ClassVar[str]
    by_hand: str

    def __init__(self, path: str) -> None:
        self.path = path

    @abc.abstractmethod
    def find(self, module: cst.Module) -> Any:
        """Return the node of `module` at which the edit goes.

        Raises:
            SeamError: there is no such node, more than one, or it has been changed already.
        """

    @abc.abstractmethod
    def edit(self, module: cst.Module) -> cst.Module:
        """Return the module with the edit made at the node that `find` returns.

        Raises:
            SeamError: as `find`.
        """

    def instructions(self) -> str:
        """Return how a person makes the whole edit: `by_hand`, and what that needs elsewhere in the file."""
        return self.by_hand

    def error(self, reason: str) -> SeamError:
        """Return the error that says why this seam cannot be edited.

        Args:
            reason: what was found instead, one line, such as "there are two such calls (lines 10 and 42)".
        """
        texts = {"looked_for": self.looked_for, "by_hand": self.instructions()}
        return SeamError(reason, seam=self.name, path=self.path, **texts)
