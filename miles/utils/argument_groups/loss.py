"""Options of the objective: aggregation, loss, advantages, clipping, KL and off-policy correction."""

import argparse

from miles.utils.argument_groups.common import PLUGIN_PATH, reset_arg

LOSS_AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
"""Values of `miles.backends.training_utils.loss_aggregation.LossAggregation`, which `--help` cannot import since that
module needs torch; a test keeps the two equal."""


def add_loss_aggregation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how per-token policy loss becomes one scalar per optimizer step."""
    group = parser.add_argument_group(
        "loss aggregation",
        "How the per-token policy loss of one optimizer step becomes one scalar. The result does not depend on how "
        "the step is cut into micro-batches or spread over processes.",
    )
    # No argparse choices: validation reports an unknown mode in the same words from the command line and from YAML.
    reset_arg(
        group,
        "--loss-aggregation",
        type=str,
        default="sample_mean",
        metavar="{" + ",".join(LOSS_AGGREGATIONS) + "}",
        help="sample_mean: mean over samples of each sample's token mean (GRPO, arXiv:2402.03300). prompt_mean: token "
        "mean inside each prompt group, then mean over groups (the equation of DAPO, arXiv:2503.14476; ScaleRL, "
        "arXiv:2510.13786). token_mean: mean over all active tokens of the step (DAPO's code; Megatron's per-token "
        "loss). constant: token sum over a fixed length L, mean over samples (Dr.GRPO, arXiv:2503.20783)",
    )
    reset_arg(
        group,
        "--loss-aggregation-divisor",
        type=float,
        default=None,
        metavar="L",
        help="the fixed length L of constant, in tokens, such as the longest response allowed; positive. Needed by "
        "constant, refused by the other modes",
    )
    reset_arg(
        group,
        "--calculate-per-token-loss",
        action="store_true",
        default=False,
        help="legacy spelling of --loss-aggregation token_mean",
    )
    reset_arg(
        group,
        "--prompt-groups",
        type=str,
        choices=["complete", "ragged"],
        default="complete",
        help="what prompt_mean expects. complete: every group has exactly --n-samples-per-prompt samples, anything "
        "else is an error, and a group stays on one data-parallel rank. ragged: groups may differ in size, as after "
        "filtering, and may spread over ranks",
    )
    reset_arg(
        group,
        "--custom-pg-loss-reducer-function-path",
        **PLUGIN_PATH,
        help="own reducer of the policy loss, in place of every mode. Called as function(total_lengths, "
        "response_lengths, loss_masks, calculate_per_token_loss), it returns a function from per-token loss to a sum",
    )


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


def add_off_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add corrections for a rollout policy that is not the trained one."""
    group = parser.add_argument_group(
        "off-policy correction",
        "For rollouts whose log-probabilities differ from the trainer's: truncated importance sampling (TIS, Yao et "
        "al. 2025, https://fengyao.notion.site/off-policy-rl).",
    )
    reset_arg(
        group,
        "--use-rollout-logprobs",
        action="store_true",
        default=False,
        help="take the old policy's log-probs from the rollout and do not recompute them; excludes --use-tis",
    )
    reset_arg(
        group, "--use-tis", action="store_true", default=False, help="weight each token's loss by p_old / p_rollout"
    )
    reset_arg(group, "--tis-clip", type=float, default=2.0, help="upper bound of that weight")
    reset_arg(group, "--tis-clip-low", type=float, default=0.0, help="lower bound of that weight")
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
        help="log how far trainer and rollout log-probs are apart, without changing the loss",
    )
