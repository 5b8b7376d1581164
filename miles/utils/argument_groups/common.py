"""How options are added to a parser, ours or a host's, and how `--help` prints them."""

import argparse
import textwrap
from typing import Any

PLUGIN_PATH: dict[str, Any] = {"type": str, "default": None, "metavar": "MODULE.FUNCTION"}
"""Keywords of an option that names a function of one's own; validation imports whatever has this metavar."""


class ManualHelpFormatter(argparse.HelpFormatter):
    """Help text that ends with the default value wherever an option has one to tell, and never breaks a name."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=34, **kwargs)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # A switch is off by default and an unset option explains itself in its help; "None" would explain nothing.
        silent = action.default in (None, argparse.SUPPRESS) or isinstance(action.default, bool)
        return action.help if silent else f"{action.help} (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {int: "N", float: "X"}.get(action.type, "TEXT")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


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
