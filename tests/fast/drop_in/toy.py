"""A host of two files with three seams, to test the tool without any real host's seams."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
import libcst.matchers as m

from miles.drop_in.checkout import Checkout
from miles.drop_in.seam import Seam
from miles.utils.errors import UserError

OPTIONS = '''\
"""Options, with a dash that is not ASCII: –."""


def add_options(parser):
    parser.add_argument("--rows", type=int)
    return parser


def title():
    return "toy"
'''

STEP = """\
from toy.options import title

KEYS = ["rows", "masks"]


def step(rows):
    total = scale(rows)
    print(title())
    return total


def scale(rows):
    return sum(rows)


def evaluate(rows):
    return scale(rows) / len(rows)
"""


# By hand: what the three edits make of the two files.
OPTIONS_AFTER = OPTIONS.replace('"--rows", type=int)\n', '"--rows", type=int)\n    parser.add_argument("--mode")\n')
STEP_AFTER = STEP.replace('"masks"]', '"masks", "weights"]').replace(
    "total = scale(rows)", "total = choose(scale)(rows)"
)


class OptionSeam(Seam):
    name = "option"
    purpose = "one more option"
    looked_for = "add_options(parser) with a return"
    by_hand = "add --mode before the return"
    written = 'parser.add_argument("--mode")'

    def find(self, module: cst.Module) -> cst.CSTNode:
        found = [node for node in module.body if m.matches(node, m.FunctionDef(name=m.Name("add_options")))]
        if not found:
            raise self.error("there is no such function")
        if "--mode" in module.code:
            raise self.error("it has the option already")
        return found[0].body.body[-1]

    def edit(self, module: cst.Module) -> cst.Module:
        last = self.find(module)
        statement = cst.parse_statement(self.written, config=module.config_for_parsing)
        function = next(node for node in module.body if last in getattr(getattr(node, "body", None), "body", ()))
        below_its_comments = [
            statement.with_changes(leading_lines=last.leading_lines),
            last.with_changes(leading_lines=()),
        ]
        body = [*function.body.body[:-1], *below_its_comments]
        return module.deep_replace(function.body, function.body.with_changes(body=body))


class KeysSeam(Seam):
    name = "keys"
    purpose = "one more key that is carried"
    looked_for = "KEYS, a list"
    by_hand = 'append "weights" to KEYS'

    def find(self, module: cst.Module) -> cst.CSTNode:
        found = m.findall(module, m.Assign(targets=[m.AssignTarget(m.Name("KEYS"))], value=m.List()))
        if len(found) != 1:
            raise self.error(f"there are {len(found)} such lists")
        if "weights" in module.code:
            raise self.error("it has the key already")
        return found[0].value

    def edit(self, module: cst.Module) -> cst.Module:
        keys = self.find(module)
        longer = [*keys.elements, cst.Element(cst.SimpleString('"weights"'))]
        return module.deep_replace(keys, keys.with_changes(elements=longer))


class ScaleSeam(Seam):
    name = "scale"
    purpose = "the reducer is chosen"
    looked_for = "total = scale(rows)"
    by_hand = "write reduce(rows) instead"

    def find(self, module: cst.Module) -> cst.CSTNode:
        found = m.findall(
            module, m.Assign(targets=[m.AssignTarget(m.Name("total"))], value=m.Call(func=m.Name("scale")))
        )
        if not found:
            raise self.error("there is no such call")
        return found[0].value

    def edit(self, module: cst.Module) -> cst.Module:
        call = self.find(module)
        return module.deep_replace(call, cst.parse_expression("choose(scale)(rows)"))


@dataclass(frozen=True)
class ToyHost:
    name: str = "toy"
    layout: str = "2026-01"
    package: str = "toy"
    new_files: Mapping[str, str] = field(
        default_factory=lambda: {"toy/loss/inner/loss_aggregation.py": "loss_aggregation.py"}
    )
    seams: tuple[Seam, ...] = (OptionSeam("toy/options.py"), KeysSeam("toy/step.py"), ScaleSeam("toy/step.py"))


def detecting(host: ToyHost) -> Callable[[Checkout], ToyHost]:
    """Return the function that knows this one host."""

    def detect(checkout: Checkout) -> ToyHost:
        if not checkout.exists("toy"):
            raise UserError("no known host: it looked for toy/")
        return host

    return detect


def make_toy(root: Path, *, options: bytes = OPTIONS.encode(), step: bytes = STEP.encode()) -> Path:
    """Write the host and return its folder."""
    folder = root / "checkout"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "options.py").write_bytes(options)
    (folder / "toy" / "step.py").write_bytes(step)
    (folder / "README").write_text("a toy\n")
    return folder


def git(folder: Path, *arguments: str) -> str:
    """Run git in the folder, with a name of its own."""
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-c", "core.autocrlf=false", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit_all(folder: Path) -> None:
    """Make the folder a repository, or add to it, with everything committed."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "state")


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Return mode and bytes of everything in the folder but git's own; None for folders."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode, None if path.is_dir() else path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if ".git" not in path.relative_to(folder).parts and "__pycache__" not in path.parts
    }
