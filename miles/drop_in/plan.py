"""From a host and a checkout to the files it would have: nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from miles.drop_in.changes import FileChange
from miles.drop_in.checkout import Checkout
from miles.drop_in.seam import Seam, SeamError, Site
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.drop_in.hosts import Host

_BOM = "\ufeff"
_LOSS_AGGREGATION = "loss_aggregation.py"


@dataclass(frozen=True)
class Plan:
    """What the drop-in is in one checkout.

    Attributes:
        host: the host found.
        sites: each seam that is edited with the place of its edit, in order.
        skipped: the seams that are left to the person, in order.
        changes: the files that are new or edited, in the order of their paths.
    """

    host: Host
    sites: tuple[tuple[Seam, Site], ...]
    skipped: tuple[Seam, ...]
    changes: tuple[FileChange, ...]

    def diff(self) -> str:
        """Return the unified diff of all files."""
        return "".join(change.diff() for change in self.changes)


class SeamsError(UserError):
    """Seams were not found; nothing can be done with only some of them.

    Attributes:
        errors: one for each seam that was not found, in the order of the seams.
    """

    def __init__(self, errors: Sequence[SeamError], total: int, skip: Sequence[str] = ()) -> None:
        listed = "\n".join(str(error) for error in errors)
        names = ",".join(dict.fromkeys([*skip, *(error.seam for error in errors)]))
        super().__init__(
            f"{len(errors)} of {total} seams cannot be edited, so nothing is:\n{listed}\n"
            f"to have all others written: --skip {names}; what is skipped is left to you, by hand as said above, with "
            "the import of the adapter where it is called"
        )
        self.errors = tuple(errors)


def make_plan(host: Host, checkout: Checkout, *, skip: Sequence[str] = ()) -> Plan:
    """Compute every file that the drop-in adds or edits.

    Args:
        host: what to look for and to edit.
        checkout: the host's files, without the drop-in.
        skip: names of seams that are left to the person: they are neither looked for nor edited.

    Raises:
        SeamsError: a seam is missing or has changed; it names all of them.
        UserError: there is no seam of a name in `skip`, a file is not Python that LibCST reads, or one to be added is
            there already.
    """
    _refuse_unknown(host, skip)
    seams = [seam for seam in host.seams if seam.name not in skip]
    paths = dict.fromkeys(checkout.inside(seam.path) for seam in seams if checkout.exists(seam.path))
    sources = {path: checkout.read(path) for path in paths}
    modules = {path: _parse(path, source) for path, source in sources.items()}
    lines = {path: _positions(module) for path, module in modules.items()}
    sites, edited, errors = [], dict(modules), []
    for seam in seams:
        path = checkout.inside(seam.path)
        try:
            if path not in modules:
                raise seam.error("there is no such file")
            sites.append((seam, Site(path, lines[path][seam.find(modules[path])].start.line)))
            edited[path] = _edited(seam, edited[path])
        except SeamError as error:
            errors.append(error)
    if errors:
        raise SeamsError(errors, len(seams), skip)
    changes = [
        *(FileChange(path, source, _encode(edited[path], source)) for path, source in sources.items()),
        *(_new_file(checkout, path, resource) for path, resource in host.new_files.items()),
    ]
    skipped = tuple(seam for seam in host.seams if seam.name in skip)
    return Plan(host, tuple(sites), skipped, tuple(sorted(changes, key=lambda change: change.path)))


def _refuse_unknown(host: Host, names: Sequence[str]) -> None:
    known = list(dict.fromkeys(seam.name for seam in host.seams))
    unknown = [repr(name) for name in names if name not in known]
    if unknown:
        raise UserError(
            f"--skip takes names of seams of {host.name}, separated by commas; {', '.join(unknown)} is none. "
            f"Choose from {', '.join(known)}"
        )


def _parse(path: str, data: bytes) -> cst.Module:
    """Parse a host file, without its byte-order mark; the module's code is the file's text exactly."""
    try:
        text = data.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); the edits are made in UTF-8 files only") from error
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise UserError(f"{path} is not Python that LibCST reads: line {error.raw_line}: {error.message}") from error
    if module.code != text:
        raise UserError(f"{path} does not survive LibCST unchanged, so it is not edited; is its last line odd?")
    return module


def _encode(module: cst.Module, before: bytes) -> bytes:
    """Return the file's bytes, with a byte-order mark where it had one."""
    mark = _BOM if before.startswith(_BOM.encode()) else ""
    return (mark + module.code).encode("utf-8")


def _positions(module: cst.Module) -> Mapping[cst.CSTNode, CodeRange]:
    return MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)


def _edited(seam: Seam, module: cst.Module) -> cst.Module:
    """Return the module with one seam's edit, read again so that the next seam meets a module like any other."""
    code = seam.edit(module).code
    assert code != module.code, f"seam {seam.name} found its place and changed nothing"
    return cst.parse_module(code)


def _new_file(checkout: Checkout, path: str, resource: str) -> FileChange:
    if checkout.exists(path):
        raise UserError(
            f"{path} is to be added and is there already, though no record says that it was written by this tool; "
            "remove it, or move it away"
        )
    return FileChange(checkout.inside(path), None, _resource(resource))


def _resource(name: str) -> bytes:
    """Return a file that lands in the host: the loss-aggregation module of this package, or one of `files/`."""
    package = resources.files("miles")
    folder = ("backends", "training_utils") if name == _LOSS_AGGREGATION else ("drop_in", "files")
    for part in (*folder, name):
        package = package / part
    return package.read_bytes()
