"""What seams have in common: they look for one node, and put in calls of the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import libcst as cst
from libcst import matchers as m

from miles.drop_in import edits
from miles.drop_in.seam import Seam

ADAPTER = "loss_aggregation_adapter"

Node = TypeVar("Node")


def attribute(owner: str, name: str) -> m.Attribute:
    """Match `owner.name`, also as `self.owner.name`."""
    return m.Attribute(value=m.Name(owner) | m.Attribute(attr=m.Name(owner)), attr=m.Name(name))


def called(name: str) -> m.Call:
    """Match a call of `name`, also as `anything.name`."""
    return m.Call(func=m.Name(name) | m.Attribute(attr=m.Name(name)))


def subscript(owner: str, key: str) -> m.Subscript:
    """Match `owner["key"]`."""
    is_key: Any = m.MatchIfTrue(lambda node: isinstance(node, cst.SimpleString) and node.evaluated_value == key)
    return m.Subscript(value=m.Name(owner), slice=[m.SubscriptElement(m.Index(is_key))])


def line(*statements: Any) -> m.SimpleStatementLine:
    """Match a line that holds one of these small statements alone."""
    return m.SimpleStatementLine(body=[m.OneOf(*statements) if len(statements) > 1 else statements[0]])


def assignment(target: Any, value: Any = None) -> m.SimpleStatementLine:
    """Match the line `target = value`."""
    return line(m.Assign(targets=[m.AssignTarget(target)], value=m.DoNotCare() if value is None else value))


class AdapterSeam(Seam):
    """A seam whose edit calls the adapter.

    Attributes:
        package: the dotted package that the adapter lies in.
    """

    def __init__(self, path: str, package: str) -> None:
        super().__init__(path)
        self.package = package

    def instructions(self) -> str:
        """Return `by_hand`, with the import of the adapter where it is called."""
        if ADAPTER not in self.by_hand:
            return self.by_hand
        return f"{self.by_hand}; unless the file has it, also: from {self.package} import {ADAPTER}"

    def function(self, module: cst.Module, *names: str) -> cst.FunctionDef:
        """Return the one function that has one of these names."""
        found = [node for node in edits.find_all(module, m.FunctionDef()) if node.name.value in names]
        return self.only(found, f"function {' or '.join(names)}")

    def only(self, nodes: Sequence[Node], what: str) -> Node:
        """Return the one node of the sequence.

        Raises:
            SeamError: there is none, or more than one.
        """
        if len(nodes) != 1:
            raise self.error(f"there is no {what}" if not nodes else f"there are {len(nodes)} of: {what}")
        return nodes[0]

    def refuse_calls(self, scope: cst.CSTNode, name: str) -> None:
        """Check that the adapter's function `name` is not called in `scope` yet.

        Raises:
            SeamError: it is.
        """
        if edits.find_all(scope, m.Call(func=m.Attribute(value=m.Name(ADAPTER), attr=m.Name(name)))):
            raise self.error(f"it has been changed already: {ADAPTER}.{name} is called there")

    def refuse_strings(self, strings: Sequence[str], values: Sequence[str]) -> None:
        """Check that none of the values is among the strings of a literal.

        Raises:
            SeamError: one is.
        """
        there = [value for value in values if value in strings]
        if there:
            raise self.error(f"it has been changed already: {', '.join(there)} is there")

    def require_names(self, scope: cst.CSTNode, *codes: str) -> None:
        """Check that `scope` knows every name that the code to be written reads.

        Raises:
            SeamError: it does not.
        """
        known = {node.value for node in edits.find_all(scope, m.Name())} | {ADAPTER}
        missing = sorted(edits.names_needed(codes) - known)
        if missing:
            raise self.error(f"there is no {' and no '.join(missing)} around it, which the edit needs")

    def write_after(self, module: cst.Module, statement: cst.CSTNode, code: str) -> cst.Module:
        """Put a call of the adapter after a statement of a function that knows its names."""
        self.require_names(edits.enclosing_function(module, statement), code)
        return self.with_import(edits.insert_after(module, statement, code))

    def write_before(self, module: cst.Module, statement: cst.CSTNode, *codes: str) -> cst.Module:
        """Put calls of the adapter before a statement of a function that knows their names."""
        self.require_names(edits.enclosing_function(module, statement), *codes)
        return self.with_import(edits.insert_before(module, statement, *codes))

    def with_import(self, module: cst.Module) -> cst.Module:
        """Import the adapter at the top of the module."""
        return edits.import_from(module, self.package, ADAPTER)
