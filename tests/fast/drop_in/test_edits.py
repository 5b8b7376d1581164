"""Edits of parsed code: they fit in, and leave everything around them as it was."""

import libcst as cst
import libcst.matchers as m
import pytest

from miles.drop_in import edits
from miles.drop_in.seam import SeamError
from miles.drop_in.seams import loss, samples, training


def parse(*lines, end="\n"):
    return cst.parse_module("".join(line + end for line in lines))


def literal_of(module):
    return m.findall(module, m.OneOf(m.List(), m.Set(), m.Dict()))[0]


def statement_of(module, code):
    lines = m.findall(module, m.SimpleStatementLine())
    return next(line for line in lines if module.code_for_node(line).splitlines()[-1].strip() == code)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (['KEYS = ["a", "b"]'], ['KEYS = ["a", "x", "y", "b"]']),
        (['KEYS = ["b", "a"]'], ['KEYS = ["b", "a", "x", "y"]']),
        (['KEYS = {"a"}'], ['KEYS = {"a", "x", "y"}']),
        (
            ["KEYS = [", '    "a",  # first', "    # second", '    "b",', "]"],
            ["KEYS = [", '    "a",  # first', "    # second", '    "x",', '    "y",', '    "b",', "]"],
        ),
        (["KEYS = [", '    "b",', '    "a",', "]"], ["KEYS = [", '    "b",', '    "a",', '    "x",', '    "y",', "]"]),
        (
            ["KEYS = [", '    "a",', "    *others,", "]"],
            ["KEYS = [", '    "a",', '    "x",', '    "y",', "    *others,", "]"],
        ),
    ],
)
def test_strings_are_laid_out_as_their_neighbours(before, after):
    module = parse(*before)
    assert edits.add_strings(module, literal_of(module), "x", "y", after="a").code == parse(*after).code


def test_a_comment_after_an_element_stays_with_it():
    module = parse("KEYS = [", '    "a",', "    # of b", '    "b",', "]")
    edited = edits.add_strings(module, literal_of(module), "x", after="a").code
    assert edited == parse("KEYS = [", '    "a",', "    # of b", '    "x",', '    "b",', "]").code


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (['D = {"a": 1}'], ['D = {"a": 1, **more(', "    1,", ")}"]),
        (["D = {", '    "a": 1,', "}"], None),
        (
            ["D = {", '    "a": 1,', '    "b": 2,', "}"],
            ["D = {", '    "a": 1,', '    "b": 2,', "    **more(", "        1,", "    ),", "}"],
        ),
        (["D = {", '    "a": 1', "}"], None),
    ],
)
def test_entries_are_laid_out_as_their_neighbours(before, after):
    module = parse(*before)
    edited = edits.add_entries(module, literal_of(module), "**more(\n    1,\n)")
    compile(edited.code, "host", "exec")
    if after is not None:
        assert edited.code == parse(*after).code


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["  ", "    ", "\t"])
def test_statements_have_the_hosts_indentation_and_line_ends(indent, end):
    lines = ["def f(x):", "{}# of x", "{}x = 1", "", "{}# of return", "{}return x"]
    module = parse(*(line.format(indent) for line in lines), end=end)
    code = "if x:\n    x = g(\n        x\n    )"
    after = ["{0}if x:", "{0}{0}x = g(", "{0}{0}{0}x", "{0}{0})"]
    edited = edits.insert_after(module, statement_of(module, "x = 1"), code)
    expected = [*lines[:3], *after, *lines[3:]]
    assert edited.code == parse(*(line.format(indent) for line in expected), end=end).code
    edited = edits.insert_before(module, statement_of(module, "return x"), code)
    assert edited.code == parse(*(line.format(indent) for line in expected), end=end).code
    edited = edits.replace_statement(module, statement_of(module, "x = 1"), "y = 2", "z = 3")
    expected = [*lines[:2], "{}y = 2", "{}z = 3", *lines[3:]]
    assert edited.code == parse(*(line.format(indent) for line in expected), end=end).code


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["import os", "", "X = 1"], ["import os", "from host.utils import name", "", "X = 1"]),
        (["from host.utils import name"], ["from host.utils import name"]),
        (["from host.utils import alpha"], ["from host.utils import alpha, name"]),
        (["from host.utils import zeta"], ["from host.utils import zeta, name"]),
        (["from host.utils import a, z"], ["from host.utils import a, name, z"]),
        (
            ["from host.utils import (", "    a,", "    z,", ")"],
            ["from host.utils import (", "    a,", "    name,", "    z,", ")"],
        ),
        (
            ["import os", "", "from host.alpha import a", "from host.zeta import z"],
            ["import os", "", "from host.alpha import a", "from host.utils import name", "from host.zeta import z"],
        ),
        (
            ["import os", "", "# ours", "from host.zeta import z"],
            ["import os", "", "# ours", "from host.utils import name", "from host.zeta import z"],
        ),
        (
            ["from host.alpha import a", "", "from ..utils import b"],
            ["from host.alpha import a", "from host.utils import name", "", "from ..utils import b"],
        ),
    ],
)
def test_imports_have_their_place(before, after):
    assert edits.import_from(parse(*before), "host.utils", "name").code == parse(*after).code


def test_where_a_name_comes_from():
    module = parse("from a.b import c", "from ..d import (", "    e,", "    f as g,", ")", "from . import h")
    assert [edits.source_of(module, name) for name in "ceh"] == ["a.b", "..d", "."]
    assert edits.source_of(module, "z") is None


def test_calls_are_laid_out_as_black_does():
    assert edits.call_code("f(", ["a", "b"], depth=1, width=11) == "f(a, b)"
    assert edits.call_code("f(", ["a", "b"], depth=1, width=10) == "f(\n    a,\n    b,\n)"
    assert edits.call_code("long_name(", ["a", "b"], depth=1, width=16) == "long_name(\n    a, b\n)"


def test_names_that_code_needs():
    codes = ["x = f(a.b, key=c)", "if x is not None:\n    return x"]
    assert edits.names_needed(codes) == {"f", "a", "c"}
    assert edits.names_needed(['data["k"] = v']) == {"data", "v"}


def test_the_innermost_function():
    module = parse("def f():", "    def g():", "        x = 1", "    y = 2")
    for code, name, depth in [("x = 1", "g", 2), ("y = 2", "f", 1)]:
        node = statement_of(module, code)
        assert edits.enclosing_function(module, node).name.value == name
        assert edits.depth(module, node) == depth


@pytest.mark.parametrize(
    ("seam", "lines", "missing"),
    [
        (samples.PromptColumns, ["def f(args, rows):", '    train_data["loss_masks"] = rows'], "samples"),
        (
            training.FSDPBatchTokens,
            ["def _train_core():", "    for step_id in x:", "        batch = get_batch(x)"],
            None,
        ),
        (
            loss.TokenDivisor,
            ["def loss_function(args, batch, apply_megatron_loss_scaling):", "    return loss, 1"],
            "parallel_state",
        ),
    ],
)
def test_an_edit_needs_its_names(seam, lines, missing):
    """A host that calls things otherwise is told so, rather than given code that fails when it runs."""
    module = parse("import os", "", *lines)
    if missing is None:
        assert seam("file.py", "host.utils").edit(module)
        return
    with pytest.raises(SeamError, match=f"there is no {missing} around it, which the edit needs"):
        seam("file.py", "host.utils").edit(module)
