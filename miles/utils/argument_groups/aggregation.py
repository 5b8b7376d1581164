"""Options of the aggregation: how per-token loss becomes one scalar per optimizer step."""

import argparse
from typing import Any

from miles.backends.training_utils.loss_aggregation import MODES
from miles.utils.argument_groups.common import PLUGIN_PATH, reset_arg

LAW_CHOICES = {
    "prompt_groups": ("complete", "ragged"),
    "loss_weight_normalization": ("weights", "tokens"),
    "aux_loss_aggregation": ("sample_mean", "match"),
    "rejected_tokens": ("drop", "keep"),
    "tis_type": ("truncated", "icepop", "geometric_rejection"),
}
"""What the options that change the law's masks, weights and units admit, the default first. Those of `tis_type` are
the names in `miles.backends.training_utils.loss_hub.corrections.BUILT_IN`, which a test keeps equal."""


def law_choice(name: str) -> dict[str, Any]:
    """Return the keywords of an option of `LAW_CHOICES`."""
    return {"type": str, "choices": list(LAW_CHOICES[name]), "default": LAW_CHOICES[name][0]}


def add_loss_aggregation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how per-token policy loss becomes one scalar per optimizer step."""
    group = parser.add_argument_group(
        "loss aggregation",
        "How the per-token policy loss of one optimizer step becomes one scalar. The result does not depend on how "
        "the step is split into micro-batches or spread over processes.",
    )
    # No argparse choices: validation reports an unknown mode in the same words from the command line and from YAML.
    reset_arg(
        group,
        "--loss-aggregation",
        type=str,
        default=next(iter(MODES)),
        metavar="{" + ",".join(MODES) + "}",
        help=". ".join(f"{mode.name}: {mode.summary} ({mode.source})" for mode in MODES.values()),
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
        **law_choice("prompt_groups"),
        help="what a rollout holds, for every mode. complete: whole steps of --global-batch-size samples and, under "
        "prompt_mean, groups of exactly --n-samples-per-prompt samples that stay on one data-parallel rank. ragged: "
        "any number of samples in groups of any size, as after filtering; a rollout is cut between groups (between "
        "samples that have no group_index) into steps of about --global-batch-size samples, each averaged over what "
        "it holds, and groups may spread over ranks",
    )
    reset_arg(
        group,
        "--loss-weight-normalization",
        **law_choice("loss_weight_normalization"),
        help="what a token with a weight (Sample.loss_weights) adds to the divisors of the modes. weights: its "
        "weight, so that means are weighted means. tokens: 1, so that a weight scales the token's loss",
    )
    reset_arg(
        group,
        "--custom-pg-loss-reducer-function-path",
        **PLUGIN_PATH,
        help="own reducer of the policy loss, in place of every mode. Called as function(total_lengths, "
        "response_lengths, loss_masks, calculate_per_token_loss), it returns a function from per-token loss to a sum. "
        "A function that declares the keyword `context` also gets the counts and totals of the whole step",
    )
