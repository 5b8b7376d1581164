"""The command line of the report, and the training namespaces that it stands for.

Whatever changes the numbers in training is the training command's own option, with its name, type and rules.
"""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from miles.backends.training_utils.loss_aggregation import MODES
from miles.utils.arguments import build_parser, miles_validate_args
from miles.utils.errors import UserError
from miles.utils.loss_aggregation_args import resolve_loss_aggregation_args
from miles.utils.options import Options
from miles.utils.options.declare import ManualHelpFormatter, reset_arg

TRAINING_OPTIONS = (
    *("--n-samples-per-prompt", "--global-batch-size", "--prompt-groups", "--loss-weight-normalization"),
    *("--reward-key", "--custom-reward-post-process-path", "--advantage-estimator"),
    *("--disable-grpo-std-normalization", "--disable-rewards-normalization", "--normalize-advantages"),
)
"""Options of training that change a weight or an advantage, in the order of `--help`."""

SMALLEST_DIVISOR = 1e-20
"""With a smaller L, weights and their squares could leave float64."""

_DESCRIPTION = (
    "Show what each mode of --loss-aggregation does to rollouts: how much a token, an answer, a prompt weighs, which "
    "answers a switch of mode favours, and how much another learning rate it amounts to. Reads dumps of this trainer, "
    "Miles and slime; computes on a CPU, without a model."
)
_EPILOG = (
    "exit status: 0 reported; 2 something for you to fix, one line says what. docs/aggregation-report.md explains."
)


def build_report_parser() -> argparse.ArgumentParser:
    """Return the command line's parser; long options cannot be abbreviated, as in training."""
    parser = argparse.ArgumentParser(
        prog="python -m miles.tools.aggregation_report",
        usage="%(prog)s [OPTIONS] ROLLOUTS.pt [MORE.pt ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=ManualHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "dumps",
        nargs="+",
        metavar="ROLLOUTS.pt",
        help="rollout dumps (--save-debug-rollout-data). `{rollout_id}` in a path stands for every number of which "
        "there is a file",
    )
    _add_report_options(parser.add_argument_group("report"))
    _add_training_options(parser)
    return parser


def _add_report_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, default=None, metavar="FILE.json", help="write every number here, too")
    group.add_argument("--plot", type=Path, default=None, metavar="FILE.png", help="draw it, too (extra `plot`)")
    group.add_argument("--top", type=int, default=5, help="how many of the heaviest prompts to list")
    group.add_argument(
        "--right-above",
        type=float,
        default=None,
        help="answers whose raw reward is larger than this count as right, the others as wrong. Unset: of two "
        "different rewards in the data the larger is right; of more than two, those above 0",
    )
    group.add_argument(
        "--skip-bad",
        action="store_true",
        default=False,
        help="report samples that cannot be trained on, and go on without them, in place of stopping at the first",
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the training command's own actions, with the defaults that suit data instead of a run."""
    group = parser.add_argument_group("as in training")
    actions = build_parser()._option_string_actions
    divisor = actions["--loss-aggregation-divisor"]
    divisor.option_strings = ["--divisor", *divisor.option_strings]
    group._add_action(divisor)
    for name in TRAINING_OPTIONS:
        group._add_action(actions[name])
    reset_arg(
        group,
        "--loss-aggregation-divisor",
        default=None,
        help="the fixed length L of constant, in tokens; positive. Unset: the longest response in the data",
    )
    reset_arg(
        group,
        "--n-samples-per-prompt",
        default=None,
        help="answers of a whole prompt group; others are reported. Unset: the most frequent size. Samples without "
        "group_index are grouped by their place, so many at a time, to normalize their rewards",
    )
    reset_arg(
        group,
        "--global-batch-size",
        default=None,
        help="samples (not prompts) in one optimizer step; with --prompt-groups ragged about so many. Unset: each "
        "dump is one step",
    )


def training_args(options: Namespace) -> Options:
    """Return the namespace that training would have with these options, resolved and validated as there.

    Args:
        options: What `build_report_parser` parsed. Its unset `n_samples_per_prompt`, `global_batch_size` and
            `loss_aggregation_divisor` stay None in the result, for the data to decide.

    Raises:
        UserError: an option, or a combination of them, that training refuses.
    """
    if options.top < 1:
        raise UserError(f"--top must be at least 1; got {options.top}")
    divisor = options.loss_aggregation_divisor
    if divisor is not None and 0 < divisor < SMALLEST_DIVISOR:
        raise UserError(f"--divisor must be at least {SMALLEST_DIVISOR:g} tokens; got {divisor:g}")
    if options.right_above is not None and not math.isfinite(options.right_above):
        raise UserError(f"--right-above must be a finite number; got {options.right_above}")
    args = build_parser().parse_args([])
    given = {name: value for name, value in vars(options).items() if hasattr(args, name)}
    vars(args).update({name: value for name, value in given.items() if value is not None})
    args.loss_aggregation = "sample_mean" if options.loss_aggregation_divisor is None else "constant"
    # How many samples a rollout has, which complete groups are held against, the dumps say.
    args.prompt_groups = "ragged"
    miles_validate_args(args)
    by_data = ("n_samples_per_prompt", "global_batch_size", "loss_aggregation_divisor", "prompt_groups")
    return with_values(Options.of(args), **{name: given[name] for name in by_data})


def with_values(args: Options, **values: Any) -> Options:
    """Return a copy of a namespace with other values."""
    return Options.of(Namespace(**{**vars(args), **values}))


def args_of_mode(args: Options, mode: str, *, divisor: float) -> Options:
    """Return the namespace of one mode of `--loss-aggregation`.

    Args:
        args: From `training_args`.
        mode: Its name.
        divisor: L, which modes with a divisor alone get.
    """
    mode_args = with_values(
        args,
        loss_aggregation=mode,
        calculate_per_token_loss=False,
        loss_aggregation_divisor=divisor if MODES[mode].needs_divisor else None,
    )
    resolve_loss_aggregation_args(mode_args)
    return mode_args
