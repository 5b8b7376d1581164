"""The public API: names are imported at first use, from their home modules, and docs/api.md lists each of them."""

import ast
import importlib
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import miles

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| `(\w+)` \| .* \| `(\S+)` \|$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
SOURCES = dict(ROWS)


def test_the_page_lists_each_public_name_once():
    assert sorted(name for name, _ in ROWS) == sorted(miles.__all__)


@pytest.mark.parametrize("name", miles.__all__)
def test_a_name_is_the_object_of_its_source(name):
    module = SOURCES[name].removesuffix(".py").replace("/", ".")
    assert getattr(miles, name) is getattr(importlib.import_module(module), name)
    assert name in dir(miles)


def test_type_checkers_see_the_same_sources():
    [block] = [node for node in ast.parse(Path(miles.__file__).read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert {name: f"{module.replace('.', '/')}.py" for name, module in seen.items()} == SOURCES
    assert (Path(miles.__file__).parent / "py.typed").exists()


def test_importing_the_package_does_not_import_torch():
    code = "import sys, miles; assert dir(miles) and miles.__version__; assert 'torch' not in sys.modules"
    code += "; from miles import get_sum_of_sample_mean; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'miles' has no attribute 'no_such_name'"):
        _ = miles.no_such_name
    with pytest.raises(ImportError):
        exec("from miles import no_such_name")


def test_the_version_of_a_copy_that_was_never_installed(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.delitem(vars(miles), "__version__", raising=False)
    assert miles.__version__ == "0+unknown"
    del miles.__version__  # what was there comes back
