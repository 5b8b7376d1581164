"""Where the trainer declares and checks its options."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m

from miles.drop_in import edits
from miles.drop_in.seams.base import ADAPTER, AdapterSeam, assignment, attribute, called, line

_ANCHOR = "--custom-pg-loss-reducer-function-path"
_NAMES = ("--loss-aggregation", "--loss-aggregation-divisor")


class Options(AdapterSeam):
    """Declares the two options, next to that of the custom reducer."""

    name = "options"
    purpose = "declare --loss-aggregation and --loss-aggregation-divisor"
    looked_for = f'the statement parser.add_argument("{_ANCHOR}", ...)'
    by_hand = f"call {ADAPTER}.add_arguments(parser) where the options of the loss are declared"

    def find(self, module: cst.Module) -> Any:
        """Return the statement that declares the custom reducer's option."""
        self.refuse_calls(module, "add_arguments")
        self._refuse_namesakes(module)
        declared = m.Arg(m.MatchIfTrue(lambda node: getattr(node, "evaluated_value", None) == _ANCHOR))
        call = m.Call(func=m.Attribute(attr=m.Name("add_argument")), args=[declared, m.ZeroOrMore()])
        return self.only(edits.find_all(module, line(m.Expr(call))), f"declaration of {_ANCHOR}")

    def edit(self, module: cst.Module) -> cst.Module:
        """Declare the options after it."""
        statement = self.find(module)
        parser = module.code_for_node(statement.body[0].value.func.value)
        return self.write_after(module, statement, f"{ADAPTER}.add_arguments({parser})")

    def _refuse_namesakes(self, module: cst.Module) -> None:
        """Check that no option of the host has a name that the adapter declares: argparse takes each once."""
        strings = [argument.value for call in edits.find_all(module, m.Call()) for argument in call.args]
        declared = {node.evaluated_value for node in strings if isinstance(node, cst.SimpleString)}
        there = [name for name in _NAMES if name in declared]
        if there:
            raise self.error(f"the host has {' and '.join(there)} of its own; rename it, or remove it, first")


class _AfterYaml(AdapterSeam):
    """A place at the `if args.custom_config_path` that reads the YAML file and overrides the options with it."""

    def block(self, module: cst.Module) -> cst.If:
        """Return the `if` statement."""
        found = [
            node
            for node in edits.find_all(module, m.If(test=attribute("args", "custom_config_path") | m.Comparison()))
            if edits.find_all(node.test, attribute("args", "custom_config_path"))
            and edits.find_all(node.body, called("safe_load"))
        ]
        return self.only(found, "if args.custom_config_path that loads a YAML file")


class YamlSpellings(_AfterYaml):
    """Makes the two spellings of the token mean agree where a YAML file sets them."""

    name = "yaml-spellings"
    purpose = "let a YAML file decide between --loss-aggregation and --calculate-per-token-loss"
    looked_for = "if args.custom_config_path: ... NAME = yaml.safe_load(...)"
    by_hand = f"pass the loaded mapping through {ADAPTER}.resolve_overrides(args, mapping) before it overrides args"

    def find(self, module: cst.Module) -> Any:
        """Return the statement that loads the file."""
        block = self.block(module)
        self.refuse_calls(block, "resolve_overrides")
        lines = [
            node
            for node in edits.find_all(block.body, assignment(m.Name()))
            if edits.find_all(node, called("safe_load"))
        ]
        return self.only(lines, "assignment of yaml.safe_load(...)")

    def edit(self, module: cst.Module) -> cst.Module:
        """Pass what was loaded through the adapter."""
        statement = self.find(module)
        name = statement.body[0].targets[0].target.value
        code = f"{name} = {ADAPTER}.resolve_overrides(args, {name})"
        return self.write_after(module, statement, code)


class Validation(_AfterYaml):
    """Checks the options once the YAML file has overridden them."""

    name = "validation"
    purpose = "check the options, and set calculate_per_token_loss for token_mean"
    looked_for = "if args.custom_config_path: ... that loads a YAML file"
    by_hand = f"call {ADAPTER}.validate_arguments(args) after a YAML file has overridden the options"

    def find(self, module: cst.Module) -> Any:
        """Return the `if` statement."""
        self.refuse_calls(module, "validate_arguments")
        return self.block(module)

    def edit(self, module: cst.Module) -> cst.Module:
        """Check after it."""
        return self.write_after(module, self.find(module), f"{ADAPTER}.validate_arguments(args)")
