"""Edits that seams have in common, made on LibCST trees so that everything around them stays as it is.

A tree is never changed in place: each function returns another module. Code that is put in is written with four spaces
and line feeds, and comes out with the host's own indentation and line endings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m


def find_all(tree: cst.CSTNode, pattern: m.BaseMatcherNode | m.MatchIfTrue) -> list[Any]:
    """Return the nodes of a tree that match; what their attributes are, the pattern says, and no type can."""
    return list(m.findall(tree, pattern))


def replace(module: cst.Module, node: cst.CSTNode, *new: cst.CSTNode) -> cst.Module:
    """Put nodes in the place of one."""
    only: Any = new[0] if len(new) == 1 else cst.FlattenSentinel(new)
    return module.deep_replace(node, only)


def contains(node: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Say whether `other` is `node` or a part of it."""
    return bool(find_all(node, m.MatchIfTrue(lambda part: part is other)))


def enclosing_function(module: cst.Module, node: cst.CSTNode) -> cst.FunctionDef:
    """Return the innermost function that `node` is in; it has to be in one."""
    functions = [function for function in find_all(module, m.FunctionDef()) if contains(function, node)]
    return next(inner for inner in functions if not any(contains(inner, f) for f in functions if f is not inner))


class _NamesRead(cst.CSTVisitor):
    """Collects the names that code reads and does not set itself."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.set: set[str] = set()

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        if isinstance(node.target, cst.Name):
            self.set.add(node.target.value)
        return not isinstance(node.target, cst.Name)

    def visit_Name(self, node: cst.Name) -> None:
        self.read.add(node.value)


def names_needed(codes: Sequence[str]) -> set[str]:
    """Return the names that statements (or expressions) read before they set them, those of constants left out."""
    visitor, needed = _NamesRead(), set()
    for code in codes:
        known = set(visitor.set)
        visitor.read.clear()
        cst.parse_module(code).visit(visitor)
        needed |= visitor.read - known
    return needed - {"None", "True", "False"}


def string_values(literal: cst.List | cst.Set) -> list[str]:
    """Return the plain strings among the elements of a list or set literal."""
    values = [each.value for each in literal.elements if isinstance(each.value, cst.SimpleString)]
    return [value.evaluated_value for value in values if isinstance(value.evaluated_value, str)]


def parse_statement(module: cst.Module, code: str) -> cst.BaseStatement:
    """Parse a statement for a place in `module`."""
    lines = code.replace("\n", module.default_newline).replace("    ", module.default_indent)
    return cst.parse_statement(lines, config=module.config_for_parsing)


def parse_expression(module: cst.Module, code: str) -> cst.BaseExpression:
    """Parse an expression for a place in `module`."""
    lines = code.replace("\n", module.default_newline).replace("    ", module.default_indent)
    return cst.parse_expression(lines, config=module.config_for_parsing)


def insert_after(module: cst.Module, statement: cst.CSTNode, *codes: str) -> cst.Module:
    """Put statements after one."""
    added = [parse_statement(module, code) for code in codes]
    return replace(module, statement, statement, *added)


def insert_before(module: cst.Module, statement: cst.CSTNode, *codes: str) -> cst.Module:
    """Put statements before one, above its comments and blank lines."""
    return replace(module, statement, *(parse_statement(module, code) for code in codes), statement)


def replace_statement(module: cst.Module, statement: cst.SimpleStatementLine, *codes: str) -> cst.Module:
    """Put statements in the place of one; its comments and blank lines stay above them."""
    first, *others = (parse_statement(module, code) for code in codes)
    return replace(module, statement, first.with_changes(leading_lines=statement.leading_lines), *others)


def depth(module: cst.Module, node: cst.CSTNode) -> int:
    """Return how many blocks `node` is indented by."""
    return sum(contains(block, node) for block in find_all(module, m.IndentedBlock()))


def call_code(start: str, arguments: Sequence[str], end: str = ")", *, depth: int, width: int = 119) -> str:
    """Return a call as black lays it out.

    Args:
        start: up to and with the opening parenthesis.
        arguments: code of each argument.
        end: from the closing parenthesis on.
        depth: how many blocks the line will be indented by.
        width: longest line.
    """
    available = width - 4 * depth
    inside = ", ".join(arguments)
    if len(start + inside + end) <= available:
        return start + inside + end
    if len(inside) + 4 <= available:
        return f"{start}\n    {inside}\n{end}"
    return start + "".join(f"\n    {argument}," for argument in arguments) + f"\n{end}"


def add_strings(module: cst.Module, literal: cst.List | cst.Set, *values: str, after: str) -> cst.Module:
    """Put strings into a list or set literal, after the string `after`, each laid out as its neighbours are."""
    elements = list(literal.elements)
    for value in reversed(values):
        index = next(i for i, item in enumerate(elements) if _is_string(item.value, after))
        elements = _inserted(elements, index, cst.Element(cst.SimpleString(f'"{value}"')))
    return replace(module, literal, literal.with_changes(elements=elements))


def add_entries(module: cst.Module, literal: cst.Dict, *codes: str, index: int = -1) -> cst.Module:
    """Put entries into a dict literal, after that at `index`.

    Args:
        module: the module.
        literal: the dict literal.
        codes: the entries, such as `"key": value` or `**entries`.
        index: the entry to put them after.
    """
    elements, index = list(literal.elements), range(len(literal.elements))[index]
    comma = elements[max(min(index, len(elements) - 2), 0)].comma
    space = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    margin = space.last_line.value if isinstance(space, cst.ParenthesizedWhitespace) else ""
    for code in reversed(codes):
        entry = parse_expression(module, "{" + code.replace("\n", f"\n{margin}") + "}")
        assert isinstance(entry, cst.Dict)
        elements = _inserted(elements, index, entry.elements[0])
    return replace(module, literal, literal.with_changes(elements=elements))


def _is_string(node: cst.CSTNode | None, value: str) -> bool:
    return isinstance(node, cst.SimpleString) and node.evaluated_value == value


def _inserted(items: list[Any], index: int, new: cst.CSTNode) -> list[Any]:
    """Return elements, entries or imported names with a new one after that at `index`, laid out as the others are."""
    anchor = items[index]
    if index + 1 < len(items):
        between = _without_comment(anchor.comma)
        return [*items[: index + 1], new.with_changes(comma=between), *items[index + 1 :]]
    space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    between = _without_comment(items[index - 1].comma) if index else space
    return [*items[:index], anchor.with_changes(comma=between), new.with_changes(comma=anchor.comma)]


def _without_comment(comma: cst.Comma) -> cst.Comma:
    space = comma.whitespace_after
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return comma
    line = space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
    return comma.with_changes(whitespace_after=space.with_changes(first_line=line, empty_lines=()))


def import_from(module: cst.Module, package: str, name: str) -> cst.Module:
    """Import `name` from `package` at the top of the module, in its alphabetical place, unless it is there."""
    lines = _imports_from(module)
    same = [statement for _, source, statement in lines if source == package]
    if any(alias.name.value == name for statement in same for alias in statement.names):
        return module
    if same:
        names = list(same[-1].names)
        smaller = [index for index, alias in enumerate(names) if alias.name.value < name]
        names = _inserted(names, smaller[-1] if smaller else len(names) - 1, cst.ImportAlias(cst.Name(name)))
        return replace(module, same[-1], same[-1].with_changes(names=names))
    code = f"from {package} import {name}"
    top = package.split(".")[0]
    relatives = [(line, source) for line, source, _ in lines if source.split(".")[0] == top]
    before = [line for line, source in relatives if source < package]
    if relatives and not before:
        after, _ = relatives[0]
        first = parse_statement(module, code).with_changes(leading_lines=after.leading_lines)
        return replace(module, after, first, after.with_changes(leading_lines=()))
    anchors = before or [line for line in module.body if _is_import(line)]
    return insert_after(module, anchors[-1], code)


def source_of(module: cst.Module, name: str) -> str | None:
    """Return the package that the module imports `name` from, None where it does not."""
    named = m.ImportFrom(names=[m.ZeroOrMore(), m.ImportAlias(m.Name(name)), m.ZeroOrMore()])
    return next((source for _, source, statement in _imports_from(module) if m.matches(statement, named)), None)


def _imports_from(module: cst.Module) -> list[tuple[Any, str, Any]]:
    """Return the lines `from PACKAGE import ...` at the top of a module: line, package, statement."""
    lines: list[Any] = [line for line in module.body if m.matches(line, m.SimpleStatementLine(body=[m.ImportFrom()]))]
    return [(line, _imported_package(module, line.body[0]), line.body[0]) for line in lines]


def _imported_package(module: cst.Module, statement: cst.ImportFrom) -> str:
    dots = "." * len(statement.relative)
    return dots + (module.code_for_node(statement.module) if statement.module is not None else "")


def _is_import(line: cst.BaseStatement) -> bool:
    return m.matches(line, m.SimpleStatementLine(body=[m.OneOf(m.Import(), m.ImportFrom())]))
