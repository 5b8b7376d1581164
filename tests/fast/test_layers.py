"""Imports lead down the layers that CONTRIBUTING.md lists, never up."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [
    [name.replace("/", ".").removesuffix(".py").removesuffix(".") for name in re.findall(r"`(miles/[^`]+)`", row)]
    for row in re.findall(r"^\| (`miles/.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
]
"""Of CONTRIBUTING.md, from the bottom to the top; a module belongs to the first that its name begins with."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "miles").rglob("*.py"))
    if "files" not in path.parts  # the drop-in's adapter is written into another trainer's package
}


def layer_of(module):
    for number, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    raise AssertionError(f"{module} is in no layer; add it to CONTRIBUTING.md")


def imports_of(path):
    """The modules of this package that a file imports anywhere, in functions too, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: {node.lineno}: import by the full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else node.module for name in names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        yield from ((module, node.lineno) for module in found if module.startswith("miles."))


@pytest.mark.parametrize("module", [name for name in MODULES if name != "miles" and name != "miles.backends"])
def test_no_import_leads_up(module):
    upward = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}"
        for other, line in imports_of(MODULES[module])
        if layer_of(other) > layer_of(module)
    ]
    assert not upward, "\n".join(upward)


def test_there_are_layers():
    assert [len(names) for names in LAYERS] == [1, 1, 2, 1, 2, 4]


def test_the_copyable_module_needs_torch_and_the_standard_library_alone():
    path = ROOT / "miles/backends/training_utils/loss_aggregation.py"
    assert not list(imports_of(path))
