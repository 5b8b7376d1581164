"""How an option is declared, added to a parser (ours or a host's), and printed by `--help`.

An option is a field of a dataclass: its name, type, default and help stand once. The annotation says how the command
line reads it: `bool` is a switch, `Literal[...]` lists the choices, `list[...]` takes several values, and `X | None`
(or a default of None) may stay unset.
"""

import argparse
import dataclasses
import textwrap
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

PLUGIN = "MODULE.FUNCTION"
"""Metavar of an option that names a function of one's own; validation imports it."""


Text = str | Callable[[], str]
"""Part of a help text, or a function that writes it when the parser is built."""


def option(default: Any, help: Text, *, flag: str | None = None, metavar: Text | None = None) -> Any:
    """Declare a field of a dataclass as an option.

    Args:
        default: Its value where it is not given. None for a type without None: a later step derives it.
        help: Its description in `--help`.
        flag: Its spelling on the command line; by default the field's name with dashes.
        metavar: Placeholder of its value in `--help`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "flag": flag, "metavar": metavar})


def plugin(help: str) -> Any:
    """Declare an option that names a function of one's own."""
    return option(None, help, metavar=PLUGIN)


def option_string(name: str) -> str:
    """Return the command line's spelling of an attribute."""
    return "--" + name.replace("_", "-")


def choices(group: type, name: str) -> tuple[str, ...]:
    """Return the values that a `Literal` option of a group admits, the default first."""
    return get_args(_without_none(get_type_hints(group)[name]))


def add_option_group(parser: argparse.ArgumentParser, title: str, group: type) -> None:
    """Add the options of a dataclass under a title; its docstring describes the group."""
    target = parser.add_argument_group(title, " ".join((group.__doc__ or "").split()))
    hints = get_type_hints(group)
    for field in dataclasses.fields(group):
        keywords = _type_keywords(_without_none(hints[field.name]), field.default)
        for key in ("help", "metavar"):
            text = field.metadata[key]
            if text is not None:
                keywords[key] = text() if callable(text) else text
        flag = field.metadata["flag"] or option_string(field.name)
        reset_arg(target, flag, dest=field.name, default=field.default, **keywords)


def _without_none(hint: Any) -> Any:
    """Return `X` of `X | None`, and any other type as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        [hint] = [part for part in get_args(hint) if part is not types.NoneType]
    return hint


def _type_keywords(hint: Any, default: Any) -> dict[str, Any]:
    """Return the keywords of `add_argument` that follow from an option's type."""
    if hint is bool:
        return {"action": "store_false" if default else "store_true"}
    if get_origin(hint) is Literal:
        return {"type": str, "choices": list(get_args(hint))}
    if get_origin(hint) is list:
        return {"type": get_args(hint)[0], "nargs": "+"}
    return {"type": hint}


def reset_arg(target: Any, name: str, **kwargs: Any) -> None:
    """Add an option, or adapt the one a host's parser has already.

    Args:
        target: An `argparse.ArgumentParser`, or one of its groups.
        name: Option string, such as `--lr`.
        **kwargs: Keywords of `add_argument`. Where the option exists, only `default`, `type` and `help` are replaced:
            its destination, action and choices are the host's business.
    """
    action = target._option_string_actions.get(name)
    if action is None:
        target.add_argument(name, **kwargs)
        return
    for key in kwargs.keys() & {"default", "type", "help"}:
        setattr(action, key, kwargs[key])


class ManualHelpFormatter(argparse.HelpFormatter):
    """Help text that ends with the default value wherever an option has one to tell, and never breaks a name."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=34, **kwargs)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # A switch is off by default and an unset option explains itself in its help; "None" would explain nothing.
        silent = action.default in (None, argparse.SUPPRESS) or isinstance(action.default, bool)
        return action.help if silent else f"{action.help} (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type is int else "X" if action.type is float else "TEXT"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)
