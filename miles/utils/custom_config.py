"""The YAML file of `--custom-config-path`: reading it, checking it against the options, and overriding with it."""

import argparse
import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from miles.utils.errors import UserError
from miles.utils.loss_aggregation_args import check_loss_aggregation_mode
from miles.utils.options import Options

logger = logging.getLogger(__name__)

NEAR_MISS_CUTOFF = 0.85
"""How alike (difflib's ratio) an unknown key and an option may be before the key is taken for a slip of the pen.
`loss_agregation`, `entropy_coeff` and `microbatch_size` lie above; relatives that custom functions use, such as
`tis_level` or `rs_lower_bound`, lie below."""


class _ConfigLoader(yaml.SafeLoader):
    """YAML 1.1's safe loader, except that `1e-3` is a number, as in YAML 1.2, and a key may not stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key_node.value!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def resolve_custom_config(args: Options, actions: Iterable[argparse.Action]) -> None:
    """Override `args` in place with the file that `args.custom_config_path` names, if it names one.

    Options are set under their names; every other key becomes an attribute for custom functions and is listed in the
    log. `loss_aggregation` in the file decides both spellings of the token mean, so that the file wins over a
    `--calculate-per-token-loss` on the command line.

    Args:
        args: Parsed command line, not resolved yet, so that nothing derived from overridden values survives.
        actions: The parser's actions: what options there are, and of which type.

    Raises:
        UserError: the file is missing, is no YAML mapping, or has a key or value that an option does not admit, or
            the two spellings of the token mean disagree.
    """
    path = args.custom_config_path
    if path is None:
        return
    config = load_custom_config(path)
    options = {action.dest: action for action in actions if action.dest != argparse.SUPPRESS}
    known = options.keys() | vars(args).keys()
    for key in config:
        _check_key(key, path, known, options)
    config = {
        key: _check_value(value, options[key], path) if key in options else value for key, value in config.items()
    }
    config |= _resolve_token_mean_spellings(args, config, path)
    for key, value in config.items():
        if key in known and getattr(args, key, None) != value:
            logger.info("%s: %s = %r (was %r)", path, key, value, getattr(args, key, None))
        setattr(args, key, value)
    extra = sorted(config.keys() - known)
    if extra:
        logger.info("%s: arguments of custom functions, since no option has these names: %s", path, ", ".join(extra))


def load_custom_config(path: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        UserError: the file cannot be read, does not parse (with its line), or is not a mapping at the top.
    """
    try:
        config = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_ConfigLoader)  # a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --custom-config-path {path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that YAML's grammar admits
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{path}{line}: not valid YAML: {reason}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise UserError(
            f"{path}: the top level must be a mapping of option names to values, such as `lr: 0.001`; "
            f"got a {type(config).__name__}"
        )
    return config


def _check_key(key: Any, path: str, known: Iterable[str], options: Mapping[str, argparse.Action]) -> None:
    """Refuse a key that cannot be an attribute, or that looks like an option written wrongly."""
    if key == "custom_config_path":
        raise UserError(f"{path}: a configuration file cannot name another one; leave out custom_config_path")
    if key in known:
        return
    written = str(key).strip().lower().lstrip("-").replace("-", "_")
    spellings = {name: name for name in known}
    for dest, action in options.items():
        spellings |= {option.lstrip("-").replace("-", "_"): dest for option in action.option_strings}
    close = difflib.get_close_matches(written, spellings, n=1, cutoff=NEAR_MISS_CUTOFF)
    if close:
        raise UserError(
            f"{path}: key {key!r} is no option; did you mean {spellings[close[0]]}? Options are written with "
            "underscores; an argument of a custom function needs a name less like an option's"
        )
    if not isinstance(key, str) or not key.isidentifier():
        raise UserError(
            f"{path}: key {key!r} must be a name of letters, digits and underscores, to become an attribute"
        )


def _check_value(value: Any, action: argparse.Action, path: str, *, where: str = "") -> Any:
    """Return `value` as the command line would have stored it, or raise UserError.

    The type comes from the option's declaration alone. `null` unsets an option whose default is unset; an option with
    a converter (a host's) takes whatever the file says. An option with several values takes one, or a list of them;
    `where` tells of one in a list.
    """
    if value is None and action.default is None:
        return None
    if action.nargs == "+" and isinstance(value, list) and not where:
        return [_check_value(entry, action, path, where=" in the list") for entry in value]
    expected = bool if action.nargs == 0 else (action.type or str)
    if action.nargs not in (None, 0, "+") or expected not in _TYPE_WORDS:
        return value
    is_right = isinstance(value, (int, float) if expected is float else expected)
    if not is_right or (isinstance(value, bool) and expected is not bool):
        raise UserError(
            f"{path}: {action.dest} ({action.option_strings[0]}) must be {_TYPE_WORDS[expected]}"
            f"{', or a list of such' if action.nargs == '+' else ''}; got {value!r} ({type(value).__name__}){where}"
        )
    if action.choices is not None and value not in action.choices:
        allowed = ", ".join(map(str, action.choices))
        raise UserError(f"{path}: {action.dest} ({action.option_strings[0]}) must be one of {allowed}; got {value!r}")
    # Through its text, since an integer beyond float's range then becomes an infinity, which the ranges refuse.
    return float(str(value)) if expected is float else value


_TYPE_WORDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}


def _resolve_token_mean_spellings(args: Options, config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return what `calculate_per_token_loss` becomes, given `loss_aggregation` in the file or on the command line.

    `loss_aggregation` names one of four modes, so in the file it settles everything and the command line's legacy
    switch gives way. The switch alone settles only "token mean or not": `true` cannot replace the `prompt_mean` of
    the command line, nor can `false` say what should stand in for its `token_mean`; both are refused.
    """
    switch = config.get("calculate_per_token_loss")
    mode = config.get("loss_aggregation", args.loss_aggregation)
    check_loss_aggregation_mode(mode)
    is_token_mean = mode == "token_mean"
    if "loss_aggregation" in config:
        source, settled = path, {"calculate_per_token_loss": is_token_mean}
        agree = switch in (None, is_token_mean)
    else:
        source, settled = "the command line", {}
        # sample_mean on the command line stands for "not chosen" as well, and the switch may promote it.
        agree = switch in (None, is_token_mean) or mode == "sample_mean"
    if not agree:
        raise UserError(
            f"conflicting values: calculate_per_token_loss is {str(switch).lower()} in {path}, but loss_aggregation "
            f"is {mode} in {source}. Every mode but token_mean is incompatible with --calculate-per-token-loss, its "
            "legacy spelling; set loss_aggregation alone, in the file"
        )
    return settled
