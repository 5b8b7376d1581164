"""Options of what is trained on: rollouts, prompts, rewards, dumps and batch sizes."""

import argparse

from miles.utils.argument_groups.common import PLUGIN_PATH, reset_arg
from miles.utils.argument_groups.embedded import EMBEDDED_TASK_DEFAULTS as EMBEDDED
from miles.utils.argument_groups.embedded import TASK_DEPENDENT_DEFAULTS

RM_TYPES = ("arithmetic", "exact_match", "numeric")
"""Names in `miles.rollout.rm_hub.REWARDS`, which `--help` cannot import since it needs numpy; a test keeps the two
equal."""


def _unset(name: str) -> str:
    """Say what an option that depends on the task becomes when it is left unset."""
    embedded, own = TASK_DEPENDENT_DEFAULTS[name]
    return f"Unset: {embedded} for the embedded task, {own} for own prompts and dumps"


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many answers are sampled, and how."""
    group = parser.add_argument_group(
        "rollout", "One rollout samples answers from the policy, then trains on them for one or several steps."
    )
    reset_arg(group, "--num-rollout", type=int, default=EMBEDDED["num_rollout"], help="number of rollouts in the run")
    reset_arg(
        group,
        "--rollout-batch-size",
        type=int,
        default=EMBEDDED["rollout_batch_size"],
        help="prompts in each rollout",
    )
    reset_arg(
        group,
        "--n-samples-per-prompt",
        type=int,
        default=EMBEDDED["n_samples_per_prompt"],
        help="answers sampled for each prompt: the size of a prompt group",
    )
    reset_arg(
        group,
        "--rollout-max-response-len",
        type=int,
        default=None,
        help="longest response, in tokens; a response that reaches it counts as truncated. "
        + _unset("rollout_max_response_len"),
    )
    reset_arg(
        group,
        "--rollout-temperature",
        type=float,
        default=EMBEDDED["rollout_temperature"],
        help="sampling temperature; training divides the logits by it too",
    )
    reset_arg(group, "--rollout-seed", type=int, default=42, help="seed of the prompts' order and of sampling")
    reset_arg(
        group, "--rollout-shuffle", action="store_true", default=False, help="shuffle the prompts anew in each epoch"
    )
    reset_arg(
        group,
        "--rollout-function-path",
        **PLUGIN_PATH,
        help="own generator of samples, called like miles.rollout.generate.generate_rollout",
    )


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add prompts of one's own and their rewards."""
    group = parser.add_argument_group(
        "prompts and rewards", "Own prompts. Without --prompt-data the embedded arithmetic task is trained."
    )
    reset_arg(
        group,
        "--prompt-data",
        type=str,
        default=None,
        metavar="FILE.jsonl",
        help="prompts, one JSON object a line; needs --rm-type or --custom-rm-path (not for sft_loss)",
    )
    reset_arg(group, "--input-key", type=str, default="input", help="key of the prompt in each object")
    reset_arg(
        group,
        "--label-key",
        type=str,
        default=None,
        help="key of the right answer in each object; needed by --rm-type and sft_loss",
    )
    reset_arg(
        group,
        "--rm-type",
        type=str,
        choices=list(RM_TYPES),
        default=None,
        help="built-in reward. arithmetic: the share of characters in their right place, the embedded task's own. "
        "exact_match: 1 where the response equals the label, else 0. numeric: 1 where the last number in the "
        "response equals the label's, else 0",
    )
    reset_arg(
        group,
        "--custom-rm-path",
        **PLUGIN_PATH,
        help="own reward, called as function(args, sample), which may be async; takes precedence over --rm-type",
    )
    reset_arg(
        group, "--reward-key", type=str, default=None, help="which entry to train on where a reward is a mapping"
    )
    reset_arg(
        group,
        "--custom-reward-post-process-path",
        **PLUGIN_PATH,
        help="own reward normalisation, called as function(args, samples); returns (raw_rewards, rewards)",
    )
    reset_arg(
        group,
        "--custom-convert-samples-to-train-data-path",
        **PLUGIN_PATH,
        help="own conversion, called as function(args, samples); returns the dictionary of training columns",
    )


def add_debug_arguments(parser: argparse.ArgumentParser) -> None:
    """Add rollout dumps."""
    group = parser.add_argument_group(
        "rollout dumps", "Rollouts kept on disk. `{rollout_id}` in a path is replaced by the rollout's number."
    )
    reset_arg(
        group,
        "--save-debug-rollout-data",
        type=str,
        default=None,
        metavar="FILE.pt",
        help="write each rollout's samples here",
    )
    reset_arg(
        group,
        "--load-debug-rollout-data",
        type=str,
        default=None,
        metavar="FILE.pt",
        help="train on samples from such a file and sample none",
    )


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add optimizer steps and micro-batches."""
    group = parser.add_argument_group(
        "batch sizes",
        "A rollout of --rollout-batch-size x --n-samples-per-prompt samples is cut into optimizer steps, a step into "
        "micro-batches. Micro-batches change memory and speed, never the result.",
    )
    reset_arg(
        group,
        "--global-batch-size",
        type=int,
        default=None,
        help="samples (not prompts) in one optimizer step, over all processes. Unset: from --num-steps-per-rollout. "
        "With --prompt-groups ragged about so many",
    )
    reset_arg(
        group,
        "--num-steps-per-rollout",
        type=int,
        default=None,
        help="optimizer steps in each rollout. Unset: from --global-batch-size; 1 if that is unset too. With "
        "--prompt-groups ragged a rollout of fewer samples has fewer",
    )
    reset_arg(
        group,
        "--micro-batch-size",
        type=int,
        default=None,
        help="samples in one forward pass of one process. " + _unset("micro_batch_size"),
    )
    reset_arg(
        group,
        "--use-dynamic-batch-size",
        action="store_true",
        default=False,
        help="pack micro-batches by tokens, up to --max-tokens-per-gpu, in place of --micro-batch-size",
    )
    reset_arg(
        group,
        "--max-tokens-per-gpu",
        type=int,
        default=None,
        help="token budget (prompt and response) of one micro-batch, for --use-dynamic-batch-size",
    )
    reset_arg(
        group,
        "--balance-data",
        action="store_true",
        default=False,
        help="spread each step's samples over the data-parallel ranks by tokens",
    )
    reset_arg(
        group,
        "--log-probs-chunk-size",
        type=int,
        default=-1,
        help="tokens per chunk when log-probs are computed from logits; fewer take less memory and more time. -1 cuts "
        "the logits into chunks that take little of both",
    )
