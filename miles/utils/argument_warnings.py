"""Warnings about options that were set but change nothing in this run."""

import logging
from collections.abc import Callable

from miles.backends.training_utils.loss_aggregation import MODES
from miles.utils.errors import UserError
from miles.utils.misc import wants_context
from miles.utils.options import Options

logger = logging.getLogger(__name__)


def _has_correction(args: Options) -> bool:
    return args.use_tis or args.get_mismatch_metrics


def _reducer_wants_context(args: Options) -> bool:
    try:
        return wants_context(args)
    except UserError:  # a path that names no function, which validation is about to say
        return False


_WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], Callable[[Options], bool], str], ...] = (
    (
        ("micro_batch_size",),
        lambda args: args.use_dynamic_batch_size,
        "--use-dynamic-batch-size packs micro-batches by --max-tokens-per-gpu",
    ),
    (("max_tokens_per_gpu",), lambda args: not args.use_dynamic_batch_size, "--use-dynamic-batch-size is not set"),
    (
        ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl", "ref_load"),
        lambda args: not args.use_kl_loss,
        "--use-kl-loss is not set",
    ),
    (
        ("tis_type", "tis_clip", "tis_clip_low", "rejected_tokens", "custom_tis_function_path"),
        lambda args: not _has_correction(args),
        "neither --use-tis nor --get-mismatch-metrics is set",
    ),
    (
        ("tis_type",),
        lambda args: _has_correction(args) and args.custom_tis_function_path is not None,
        "--custom-tis-function-path takes precedence",
    ),
    (
        ("rejected_tokens",),
        lambda args: args.use_tis and args.custom_tis_function_path is None and args.tis_type == "truncated",
        "--tis-type truncated rejects no token",
    ),
    (
        ("rejected_tokens",),
        lambda args: args.get_mismatch_metrics and not args.use_tis and args.custom_tis_function_path is None,
        "--get-mismatch-metrics without --use-tis rejects no token",
    ),
    (
        # Not under token_mean: the custom reducer's sum is then divided by the step's tokens.
        ("loss_aggregation", "loss_aggregation_divisor"),
        lambda args: args.custom_pg_loss_reducer_function_path is not None
        and args.loss_aggregation in MODES
        and not MODES[args.loss_aggregation].is_for_every_loss
        and not _reducer_wants_context(args),
        "--custom-pg-loss-reducer-function-path takes precedence for the policy loss",
    ),
    (
        ("loss_weight_normalization",),
        lambda args: args.loss_type == "policy_loss"
        and args.loss_aggregation == "constant"
        and args.custom_pg_loss_reducer_function_path is None,
        "--loss-aggregation constant divides by neither weights nor tokens",
    ),
    (
        (
            *("eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "use_kl_loss", "aux_loss_aggregation"),
            *("use_tis", "tis_type", "rejected_tokens", "get_mismatch_metrics", "advantage_estimator"),
            *("custom_pg_loss_reducer_function_path", "rm_type", "custom_rm_path"),
        ),
        lambda args: args.loss_type == "sft_loss",
        "--loss-type sft_loss has neither policy-gradient term nor reward",
    ),
    (("value_clip",), lambda args: args.loss_type != "custom_loss", "train.py trains no critic"),
    (("min_lr",), lambda args: args.lr_decay_style == "constant", "--lr-decay-style is constant"),
    (
        ("grpo_std_normalization",),
        lambda args: args.advantage_estimator == "reinforce_plus_plus_baseline",
        "reinforce_plus_plus_baseline never divides by the group's standard deviation",
    ),
    (
        ("grpo_std_normalization",),
        lambda args: not args.rewards_normalization,
        "--disable-rewards-normalization leaves rewards as they are",
    ),
    (
        ("wandb_project", "wandb_team", "wandb_group", "wandb_mode", "wandb_run_id"),
        lambda args: "wandb" not in args.tracking,
        "--tracking does not name wandb",
    ),
    (
        ("wandb_project", "wandb_team", "wandb_group", "wandb_run_id"),
        lambda args: "wandb" in args.tracking and args.wandb_mode == "disabled",
        "--wandb-mode disabled keeps nothing",
    ),
    (("rm_type",), lambda args: args.custom_rm_path is not None, "--custom-rm-path takes precedence"),
    (("input_key", "label_key"), lambda args: args.prompt_data is None, "--prompt-data is not set"),
    (
        ("prompt_data", "rollout_function_path", "rollout_shuffle", "rm_type", "custom_rm_path"),
        lambda args: args.load_debug_rollout_data is not None,
        "--load-debug-rollout-data brings samples with their rewards",
    ),
    (
        ("rewards_normalization", "grpo_std_normalization"),
        lambda args: args.custom_reward_post_process_path is not None,
        "--custom-reward-post-process-path replaces the built-in normalisation",
    ),
    (
        ("custom_reward_post_process_path",),
        lambda args: args.custom_convert_samples_to_train_data_path is not None,
        "--custom-convert-samples-to-train-data-path replaces conversion, rewards included",
    ),
)
"""Options, when they change nothing, and why."""


def warn_about_options_without_effect(args: Options) -> None:
    """Log a warning for each option that differs from its default and has no effect.

    Args:
        args: Options as given, before derived values are filled in (those would look as if a person had set them).
    """
    for names, is_without_effect, reason in _WITHOUT_EFFECT:
        given = [name for name in names if getattr(args, name) != getattr(Options, name)]
        if given and is_without_effect(args):
            logger.warning("%s: no effect, since %s", ", ".join(given), reason)
    is_built_in = args.rewards_normalization and args.custom_reward_post_process_path is None
    is_alone = args.n_samples_per_prompt == 1 and args.prompt_groups == "complete"
    if is_alone and is_built_in and args.loss_type != "sft_loss":
        logger.warning(
            "n_samples_per_prompt is 1: a reward minus its group's mean is 0, so nothing is learned; "
            "raise it, or set --disable-rewards-normalization"
        )
