"""Options of the objective: loss, advantages, clipping and KL."""

import argparse

from miles.utils.argument_groups.aggregation import law_choice
from miles.utils.argument_groups.common import PLUGIN_PATH, reset_arg


def add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kind of loss, its clipping and its auxiliary terms."""
    group = parser.add_argument_group("loss", "The per-token loss and the terms added to it.")
    reset_arg(
        group,
        "--loss-type",
        type=str,
        choices=["policy_loss", "sft_loss", "custom_loss"],
        default="policy_loss",
        help="policy_loss: clipped policy gradient (PPO, arXiv:1707.06347). sft_loss: negative log-likelihood of the "
        "response. custom_loss: --custom-loss-function-path",
    )
    reset_arg(
        group,
        "--custom-loss-function-path",
        **PLUGIN_PATH,
        help="loss of --loss-type custom_loss, called as function(args, batch, logits, sum_of_sample_mean)",
    )
    reset_arg(group, "--eps-clip", type=float, default=0.2, help="the probability ratio is clipped below 1 - this")
    reset_arg(
        group,
        "--eps-clip-high",
        type=float,
        default=None,
        help="the ratio is clipped above 1 + this (DAPO's clip-higher). Unset: the same as --eps-clip",
    )
    reset_arg(
        group,
        "--eps-clip-c",
        type=float,
        default=None,
        help="dual clip (arXiv:1912.09729): where the advantage is negative, the loss is at most this times "
        "-advantage; above 1. Unset: off",
    )
    reset_arg(
        group,
        "--value-clip",
        type=float,
        default=0.2,
        help="clip range of the value loss. It serves a critic that a program of yours trains; train.py trains none",
    )
    reset_arg(
        group,
        "--entropy-coef",
        type=float,
        default=0.0,
        help="weight of the entropy bonus, per nat. 0 only logs the entropy",
    )
    _add_kl_arguments(group)
    reset_arg(
        group,
        "--aux-loss-aggregation",
        **law_choice("aux_loss_aggregation"),
        help="how the entropy and KL terms are averaged. sample_mean: as sample means in every mode, without "
        "Sample.loss_weights. match: exactly as the policy-gradient term, with its mode, weights and custom reducer; "
        "token_mean with a nonzero --entropy-coef or --kl-loss-coef needs it",
    )


def _add_kl_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the KL penalty against the reference model."""
    reset_arg(
        group,
        "--use-kl-loss",
        action="store_true",
        default=False,
        help="estimate the KL divergence from the reference model (--ref-load) and add it to the loss",
    )
    reset_arg(
        group,
        "--kl-loss-coef",
        type=float,
        default=0.0,
        help="weight of the KL term, per nat; needs --use-kl-loss. 0 only logs it",
    )
    reset_arg(
        group,
        "--kl-loss-type",
        type=str,
        choices=["k1", "k2", "k3", "low_var_kl"],
        default="k1",
        help="per-token estimator (Schulman 2020, Approximating KL Divergence), with r = log p - log p_ref: k1 is r, "
        "k2 is r^2 / 2, k3 is exp(-r) - 1 + r, low_var_kl is k3 clamped to +-10",
    )
    reset_arg(
        group,
        "--use-unbiased-kl",
        action="store_true",
        default=False,
        help="weight the KL estimate by the importance ratio, so that it stays unbiased off-policy "
        "(DeepSeek-V3.2, arXiv:2512.02556)",
    )


def add_advantage_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how rewards become advantages."""
    group = parser.add_argument_group("advantages", "How the rewards of a rollout become per-token advantages.")
    reset_arg(
        group,
        "--advantage-estimator",
        type=str,
        choices=["grpo", "gspo", "reinforce_plus_plus_baseline"],
        default="grpo",
        help="grpo: reward normalised within its prompt group (arXiv:2402.03300). gspo: the same, with one "
        "length-normalised ratio per sequence (arXiv:2507.18071). reinforce_plus_plus_baseline: the group's mean is "
        "the baseline and advantages are whitened over the batch (arXiv:2501.03262); needs --normalize-advantages",
    )
    reset_arg(
        group,
        "--disable-grpo-std-normalization",
        action="store_false",
        dest="grpo_std_normalization",
        help="subtract the group's mean but do not divide by its standard deviation (Dr.GRPO, arXiv:2503.20783)",
    )
    reset_arg(
        group,
        "--disable-rewards-normalization",
        action="store_false",
        dest="rewards_normalization",
        help="use raw rewards, without any group baseline",
    )
    reset_arg(
        group,
        "--normalize-advantages",
        action="store_true",
        default=False,
        help="whiten advantages over the active tokens of all data-parallel ranks",
    )
