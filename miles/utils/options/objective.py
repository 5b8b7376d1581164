"""Options of the objective: aggregation, loss, advantages and off-policy correction."""

from dataclasses import dataclass
from typing import Literal

from miles.backends.training_utils.loss_aggregation import MODES
from miles.utils.options.declare import option, plugin


@dataclass
class AggregationOptions:
    """How the per-token policy loss of one optimizer step becomes one scalar.

    The result does not depend on how the step is split into micro-batches or distributed over processes.
    """

    # No choices: validation reports an unknown mode in the same words from the command line and from YAML.
    loss_aggregation: str = option(
        next(iter(MODES)),
        lambda: ". ".join(f"{mode.name}: {mode.summary} ({mode.source})" for mode in MODES.values()),
        metavar=lambda: "{" + ",".join(MODES) + "}",
    )
    loss_aggregation_divisor: float | None = option(
        None,
        "the fixed length L of constant, in tokens, such as the longest response allowed; positive. Needed by "
        "constant, refused by the other modes",
        metavar="L",
    )
    calculate_per_token_loss: bool = option(False, "legacy spelling of --loss-aggregation token_mean")
    prompt_groups: Literal["complete", "ragged"] = option(
        "complete",
        "what a rollout holds, for every mode. complete: whole steps of --global-batch-size samples and, under "
        "prompt_mean, groups of exactly --n-samples-per-prompt samples that stay on one data-parallel rank. ragged: "
        "any number of samples in groups of any size, as after filtering; a rollout is split between groups (between "
        "samples that have no group_index) into steps of about --global-batch-size samples, each averaged over what "
        "it holds, and a group may have samples on several ranks",
    )
    loss_weight_normalization: Literal["weights", "tokens"] = option(
        "weights",
        "what a token with a weight (Sample.loss_weights) adds to the divisors of the modes. weights: its weight, "
        "so that means are weighted means. tokens: 1, so that a weight scales the token's loss",
    )
    custom_pg_loss_reducer_function_path: str | None = plugin(
        "own reducer of the policy loss, in place of every mode. Called as function(total_lengths, "
        "response_lengths, loss_masks, calculate_per_token_loss), it returns a function from per-token loss to a "
        "sum. A function that declares the keyword `context` also gets the counts and totals of the whole step"
    )


@dataclass
class LossOptions:
    """The per-token loss and the terms added to it."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = option(
        "policy_loss",
        "policy_loss: clipped policy gradient (PPO, arXiv:1707.06347). sft_loss: negative log-likelihood of the "
        "response. custom_loss: --custom-loss-function-path",
    )
    custom_loss_function_path: str | None = plugin(
        "loss of --loss-type custom_loss, called as function(args, batch, logits, sum_of_sample_mean)"
    )
    eps_clip: float = option(0.2, "the probability ratio is clipped below 1 - this")
    eps_clip_high: float = option(
        None, "the ratio is clipped above 1 + this (DAPO's clip-higher). Unset: the same as --eps-clip"
    )
    eps_clip_c: float | None = option(
        None,
        "dual clip (arXiv:1912.09729): where the advantage is negative, the loss is at most this times -advantage; "
        "above 1. Unset: off",
    )
    value_clip: float = option(
        0.2, "clip range of the value loss. It serves a critic that a program of yours trains; train.py trains none"
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus, per nat. 0 only logs the entropy")
    use_kl_loss: bool = option(
        False, "estimate the KL divergence from the reference model (--ref-load) and add it to the loss"
    )
    kl_loss_coef: float = option(0.0, "weight of the KL term, per nat; needs --use-kl-loss. 0 only logs it")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "k1",
        "per-token estimator (Schulman 2020, Approximating KL Divergence), with r = log p - log p_ref: k1 is r, k2 "
        "is r^2 / 2, k3 is exp(-r) - 1 + r, low_var_kl is k3 clamped to +-10",
    )
    use_unbiased_kl: bool = option(
        False,
        "weight the KL estimate by the importance ratio, so that it stays unbiased off-policy (DeepSeek-V3.2, "
        "arXiv:2512.02556)",
    )
    aux_loss_aggregation: Literal["sample_mean", "match"] = option(
        "sample_mean",
        "how the entropy and KL terms are averaged. sample_mean: as sample means in every mode, without "
        "Sample.loss_weights. match: exactly as the policy-gradient term, with its mode, weights and custom "
        "reducer; token_mean with a nonzero --entropy-coef or --kl-loss-coef needs it",
    )


@dataclass
class AdvantageOptions:
    """How the rewards of a rollout become per-token advantages."""

    advantage_estimator: Literal["grpo", "gspo", "reinforce_plus_plus_baseline"] = option(
        "grpo",
        "grpo: reward normalised within its prompt group (arXiv:2402.03300). gspo: the same, with one "
        "length-normalised ratio per sequence (arXiv:2507.18071). reinforce_plus_plus_baseline: the group's mean is "
        "the baseline and advantages are whitened over the batch (arXiv:2501.03262); needs --normalize-advantages",
    )
    grpo_std_normalization: bool = option(
        True,
        "subtract the group's mean but do not divide by its standard deviation (Dr.GRPO, arXiv:2503.20783)",
        flag="--disable-grpo-std-normalization",
    )
    rewards_normalization: bool = option(
        True, "use raw rewards, without any group baseline", flag="--disable-rewards-normalization"
    )
    normalize_advantages: bool = option(False, "whiten advantages over the active tokens of all data-parallel ranks")


@dataclass
class CorrectionOptions:
    """For rollouts whose log-probabilities differ from the trainer's.

    Truncated importance sampling (TIS, https://fengyao.notion.site/off-policy-rl) and rejection.
    """

    use_rollout_logprobs: bool = option(
        False, "take the old policy's log-probs from the rollout and do not recompute them; excludes --use-tis"
    )
    use_tis: bool = option(False, "correct each token's loss by r = p_old / p_rollout, as --tis-type says")
    tis_type: Literal["truncated", "icepop", "geometric_rejection"] = option(
        "truncated",
        "the built-in correction. truncated: every token's loss is weighted by r, clamped to the bounds (truncated "
        "importance sampling; Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL "
        "training). icepop: tokens with r outside the bounds are rejected, the others weighted by r (IcePop, "
        "arXiv:2510.18855). geometric_rejection: rows whose geometric mean of r over their active tokens is outside "
        "the bounds are rejected whole, the others stay as they are (Liu et al. 2025, When Speed Kills Stability: "
        "Demystifying RL Collapse from the Training-Inference Mismatch)",
    )
    tis_clip: float = option(
        2.0,
        "upper bound: of the weight for truncated, of a token's r for icepop, of a row's geometric mean of r for "
        "geometric_rejection, where useful bounds lie close to 1",
    )
    tis_clip_low: float = option(0.0, "lower bound of the same; below --tis-clip for icepop and geometric_rejection")
    rejected_tokens: Literal["drop", "keep"] = option(
        "drop",
        "whether tokens that a correction rejects still count in the divisors. drop: no, means are over the tokens "
        "that are left. keep: yes, as zeros, so that rejection shrinks the loss. Samples and groups that lose all "
        "of their tokens count either way",
    )
    custom_tis_function_path: str | None = plugin(
        "own correction, called with keywords (args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, "
        "total_lengths, response_lengths, ...); returns (pg_loss, modified_masks, metrics)"
    )
    get_mismatch_metrics: bool = option(
        False,
        "log how far trainer and rollout log-probs are apart. Without --use-tis a built-in correction is run for "
        "its metrics alone, and loss and masks stay; a custom one's loss and masks are used",
    )
