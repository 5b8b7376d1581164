"""Options of the correction for a rollout policy that is not the trained one."""

import argparse

from miles.utils.argument_groups.aggregation import law_choice
from miles.utils.argument_groups.common import PLUGIN_PATH, reset_arg


def add_off_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add corrections for a rollout policy that is not the trained one."""
    group = parser.add_argument_group(
        "off-policy correction",
        "For rollouts whose log-probabilities differ from the trainer's: truncated importance sampling (TIS, "
        "https://fengyao.notion.site/off-policy-rl) and rejection.",
    )
    reset_arg(
        group,
        "--use-rollout-logprobs",
        action="store_true",
        default=False,
        help="take the old policy's log-probs from the rollout and do not recompute them; excludes --use-tis",
    )
    reset_arg(
        group,
        "--use-tis",
        action="store_true",
        default=False,
        help="correct each token's loss by r = p_old / p_rollout, as --tis-type says",
    )
    _add_tis_type_arguments(group)
    reset_arg(
        group,
        "--custom-tis-function-path",
        **PLUGIN_PATH,
        help="own correction, called with keywords (args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, "
        "total_lengths, response_lengths, ...); returns (pg_loss, modified_masks, metrics)",
    )
    reset_arg(
        group,
        "--get-mismatch-metrics",
        action="store_true",
        default=False,
        help="log how far trainer and rollout log-probs are apart. Without --use-tis a built-in correction is run for "
        "its metrics alone, and loss and masks stay; a custom one's loss and masks are used",
    )


def _add_tis_type_arguments(group: argparse._ArgumentGroup) -> None:
    """Add which built-in correction there is, its bounds, and what becomes of the tokens that it rejects."""
    reset_arg(
        group,
        "--tis-type",
        **law_choice("tis_type"),
        help="the built-in correction. truncated: every token's loss is weighted by r, clamped to the bounds "
        "(truncated importance sampling; Yao et al. 2025, Your efficient RL framework secretly brings you off-policy "
        "RL training). icepop: tokens with r outside the bounds are rejected, the others weighted by r (IcePop, "
        "arXiv:2510.18855). geometric_rejection: rows whose geometric mean of r over their active tokens is "
        "outside the bounds are rejected whole, the others stay as they are (Liu et al. 2025, When Speed Kills "
        "Stability: Demystifying RL Collapse from the Training-Inference Mismatch)",
    )
    reset_arg(
        group,
        "--tis-clip",
        type=float,
        default=2.0,
        help="upper bound: of the weight for truncated, of a token's r for icepop, of a row's geometric mean of r "
        "for geometric_rejection, where useful bounds lie close to 1",
    )
    reset_arg(
        group,
        "--tis-clip-low",
        type=float,
        default=0.0,
        help="lower bound of the same; below --tis-clip for icepop and geometric_rejection",
    )
    reset_arg(
        group,
        "--rejected-tokens",
        **law_choice("rejected_tokens"),
        help="whether tokens that a correction rejects still count in the divisors. drop: no, means are over the "
        "tokens that are left. keep: yes, as zeros, so that rejection shrinks the loss. Samples and groups that lose "
        "all of their tokens count either way",
    )
