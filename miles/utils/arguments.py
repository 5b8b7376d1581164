"""The command line: its parser, the YAML overrides, and the resolved and validated namespace.

Importing this module, and `--help`, need no torch.
"""

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Sequence
from functools import lru_cache

import miles
from miles.utils.argument_validation import (
    resolve_batch_sizes,
    resolve_policy_args,
    resolve_task_args,
    validate_combinations,
    validate_data,
    validate_plugins,
    validate_ranges,
)
from miles.utils.argument_warnings import warn_about_options_without_effect
from miles.utils.custom_config import resolve_custom_config
from miles.utils.loss_aggregation_args import resolve_loss_aggregation_args, validate_loss_aggregation_args
from miles.utils.options import OPTION_GROUPS, Options
from miles.utils.options.declare import ManualHelpFormatter, add_option_group
from miles.utils.tracking_args import resolve_tracking_args, validate_tracking_args

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

_DESCRIPTION = (
    "Train a language model by reinforcement learning with an exact loss aggregation. Without options, a small model "
    "learns an embedded arithmetic task in about a minute on two CPU cores."
)
_EPILOG = (
    "An option may also stand in the YAML file of --custom-config-path, which overrides the command line. Several "
    "processes: torchrun --nproc-per-node N train.py OPTIONS."
)


def get_miles_extra_args_provider(add_custom_arguments: AddArguments | None = None) -> AddArguments:
    """Return the function that adds every option of this package to a parser.

    Args:
        add_custom_arguments: Adds options of a program of one's own, after all others.

    Returns:
        A function from parser to the same parser. Where the parser (a host's) has an option already, only its default,
        type and help are replaced.
    """

    def add_miles_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for title, group in OPTION_GROUPS.items():
            add_option_group(parser, title, group)
        return parser if add_custom_arguments is None else add_custom_arguments(parser)

    return add_miles_arguments


def build_parser(add_custom_arguments: AddArguments | None = None) -> argparse.ArgumentParser:
    """Return the command line's parser. Long options are never abbreviated: a new option would change old scripts."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=ManualHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"miles {miles.__version__}", help="print the version and exit"
    )
    return get_miles_extra_args_provider(add_custom_arguments)(parser)


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Parse, override from YAML, resolve and validate.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The options that the whole package reads.

    Raises:
        UserError: a value, a combination, a file or a plug-in that cannot be used.
        SystemExit: status 2 where argparse itself refuses the command line; 0 after `--help` and `--version`.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_suggest_option(parser, unknown)}")
    miles_validate_args(args)
    return Options.of(args)


def miles_validate_args(args: argparse.Namespace | Options) -> None:
    """Resolve and validate a parsed namespace in place: YAML overrides first, then everything derived from values.

    Args:
        args: Namespace from a parser with this package's options. Attributes that a host's namespace lacks get this
            package's defaults.

    Raises:
        UserError: the first rule that is broken, with what is allowed, what came and how to fix it.
    """
    for field in dataclasses.fields(Options):
        vars(args).setdefault(field.name, field.default)
    options = Options.of(args)
    resolve_custom_config(options, _option_actions())
    validate_ranges(options)
    resolve_tracking_args(options)
    warn_about_options_without_effect(options)
    resolve_task_args(options)
    resolve_batch_sizes(options)
    resolve_policy_args(options)
    resolve_loss_aggregation_args(options)
    validate_loss_aggregation_args(options)
    validate_combinations(options)
    validate_data(options)
    validate_tracking_args(options)
    validate_plugins(options)


@lru_cache(maxsize=1)
def _option_actions() -> tuple[argparse.Action, ...]:
    """Return the actions of this package's options that store a value."""
    return tuple(action for action in build_parser()._actions if action.default is not argparse.SUPPRESS)


def _suggest_option(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return a hint at the option that the first unknown one resembles, or nothing."""
    written = next((text.split("=")[0].replace("_", "-") for text in unknown if text.startswith("--")), "")
    close = difflib.get_close_matches(written, parser._option_string_actions, n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""
