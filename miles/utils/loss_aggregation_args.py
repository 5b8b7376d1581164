"""Resolution and rules of `--loss-aggregation` and the options that depend on it."""

import difflib
import math
import numbers
from collections.abc import Sequence
from typing import Any

from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.options.declare import choices, option_string

CHOICES = {
    name: choices(Options, name)
    for name in (
        *("prompt_groups", "loss_weight_normalization", "aux_loss_aggregation", "rejected_tokens"),
        "tis_type",
    )
}
"""Values, the default first, of the options that change masks, weights and normalizers; also checked in the namespace
of a host, which argparse may not have seen."""


def resolve_loss_aggregation_args(args: Options) -> None:
    """Make the two spellings of the token mean agree, in place.

    `--calculate-per-token-loss` promotes `sample_mean` to `token_mean`; `token_mean` sets the flag, so that code which
    knows the legacy spelling alone sees the choice. Values of a wrong type stay as they are, for validation to name.

    Args:
        args: Options; in a view of a host's namespace, missing attributes have their defaults.
    """
    per_token, mode = args.calculate_per_token_loss, args.loss_aggregation
    if mode == "sample_mean" and per_token is True:
        mode = "token_mean"
    if mode == "token_mean" and per_token is False:
        per_token = True
    args.loss_aggregation, args.calculate_per_token_loss = mode, per_token


def validate_loss_aggregation_args(args: Options) -> None:
    """Check the resolved choice against everything that depends on it; changes nothing.

    Args:
        args: Options that went through `resolve_loss_aggregation_args`.

    Raises:
        UserError: the rule that is broken, with what is allowed, what came and how to fix it.
    """
    mode, per_token = args.loss_aggregation, args.calculate_per_token_loss
    check_loss_aggregation_mode(mode)
    if not isinstance(per_token, bool):
        raise UserError(f"calculate_per_token_loss must be a boolean; got {per_token!r} ({type(per_token).__name__})")
    if per_token and mode != "token_mean":
        raise UserError(
            f"--loss-aggregation {mode} is incompatible with --calculate-per-token-loss, which is the legacy spelling "
            "of token_mean; leave one of the two out"
        )
    for name, allowed in CHOICES.items():
        check_choice(name, getattr(args, name), allowed)
    chosen = MODES[mode]
    check_divisor(chosen, args.loss_aggregation_divisor)
    _check_loss_type(chosen, args)
    _check_prompt_groups(chosen, args)


def check_loss_aggregation_mode(mode: Any) -> None:
    """Check that `mode` names a loss aggregation.

    Raises:
        UserError: it is no string, or an unknown one; the closest mode is suggested.
    """
    if not isinstance(mode, str):
        raise UserError(
            f"loss_aggregation must be a string, one of {', '.join(MODES)}; " f"got {mode!r} ({type(mode).__name__})"
        )
    if mode not in MODES:
        close = difflib.get_close_matches(mode.lower().replace("-", "_"), MODES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"Unknown --loss-aggregation mode {mode!r}; allowed: {', '.join(MODES)}{hint}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check a value that argparse has not seen, such as one of a host's namespace."""
    if value not in allowed:
        raise UserError(
            f"{option_string(name)} must be one of {', '.join(allowed)}; got {value!r} ({type(value).__name__})"
        )


def check_divisor(mode: LossAggregation, divisor: Any) -> None:
    """Check that a mode with a divisor, and only such a mode, has a positive finite one.

    Raises:
        UserError: a divisor is missing, there for nothing, or no such number.
    """
    if not mode.needs_divisor:
        if divisor is not None:
            takers = " or ".join(other.name for other in MODES.values() if other.needs_divisor)
            raise UserError(
                f"--loss-aggregation-divisor belongs to --loss-aggregation {takers}; got {divisor!r} with "
                f"{mode.name}. Leave it out, or choose {takers}"
            )
        return
    is_number = isinstance(divisor, numbers.Real) and not isinstance(divisor, bool)
    if not is_number or not 0 < divisor < math.inf:
        got = "none" if divisor is None else f"{divisor!r} ({type(divisor).__name__})"
        raise UserError(
            f"--loss-aggregation {mode.name} needs --loss-aggregation-divisor, a positive finite number of tokens "
            f"(such as the longest response allowed); got {got}"
        )


def _check_loss_type(mode: LossAggregation, args: Options) -> None:
    """Check that the loss can be aggregated this way, with its auxiliary terms."""
    loss_type = args.loss_type
    if loss_type == "sft_loss" and not mode.is_for_every_loss:
        takes = " or ".join(other.name for other in MODES.values() if other.is_for_every_loss)
        raise UserError(
            f"--loss-type sft_loss takes --loss-aggregation {takes} only; got {mode.name}. It has no "
            "prompt groups to average in, and a constant divisor is a correction of policy gradients"
        )
    if loss_type != "policy_loss" or not mode.counts_tokens:
        return
    if args.aux_loss_aggregation == "match":
        return
    coefficients = {"--entropy-coef": args.entropy_coef}
    if args.use_kl_loss:
        coefficients["--kl-loss-coef"] = args.kl_loss_coef
    given = [f"{option} {value}" for option, value in coefficients.items() if value]
    if given:
        raise UserError(
            f"--loss-aggregation {mode.name} cannot be combined with a nonzero entropy or KL-loss coefficient: "
            "auxiliary policy-loss terms are sample-normalized and would be divided by the token count; "
            f"got {', '.join(given)}. Pass --aux-loss-aggregation match, which makes them token means too, set it to "
            "0, or choose another mode"
        )


def _check_prompt_groups(mode: LossAggregation, args: Options) -> None:
    """Check that an optimizer step holds whole prompt groups where their means are taken."""
    if not mode.needs_prompt_groups or args.prompt_groups != "complete":
        return
    batch_size, group_size = args.global_batch_size, args.n_samples_per_prompt
    if batch_size and group_size and batch_size % group_size:  # 0, None: not known yet
        raise UserError(
            f"--loss-aggregation {mode.name} needs whole prompt groups in each optimizer step: global_batch_size "
            f"must be a multiple of n_samples_per_prompt; got {batch_size} and {group_size}"
        )
