"""Options of what is trained on: rollouts, prompts, rewards, dumps and batch sizes."""

from dataclasses import dataclass
from typing import Literal

from miles.utils.options.declare import option, plugin

TASK_DEPENDENT_DEFAULTS = {"rollout_max_response_len": (4, 256), "micro_batch_size": (256, 1)}
"""What unset options become: for the embedded task with its rows of a dozen tokens, and for own prompts or dumps."""


def _unset(name: str) -> str:
    embedded, own = TASK_DEPENDENT_DEFAULTS[name]
    return f"Unset: {embedded} for the embedded task, {own} for own prompts and dumps"


@dataclass
class RolloutOptions:
    """One rollout samples answers from the policy, then trains on them for one or several steps."""

    num_rollout: int = option(100, "number of rollouts in the run")
    rollout_batch_size: int = option(32, "prompts in each rollout")
    n_samples_per_prompt: int = option(8, "answers sampled for each prompt: the size of a prompt group")
    rollout_max_response_len: int = option(
        None,
        "longest response, in tokens; a response that reaches it counts as truncated. "
        + _unset("rollout_max_response_len"),
    )
    rollout_temperature: float = option(1.0, "sampling temperature; training divides the logits by it too")
    rollout_seed: int = option(42, "seed of the prompts' order and of sampling")
    rollout_shuffle: bool = option(False, "shuffle the prompts anew in each epoch")
    rollout_function_path: str | None = plugin(
        "own generator of samples, called like miles.rollout.generate.generate_rollout"
    )


@dataclass
class PromptOptions:
    """Own prompts. Without --prompt-data the embedded arithmetic task is trained."""

    prompt_data: str | None = option(
        None,
        "prompts, one JSON object a line; needs --rm-type or --custom-rm-path (not for sft_loss)",
        metavar="FILE.jsonl",
    )
    input_key: str = option("input", "key of the prompt in each object")
    label_key: str | None = option(None, "key of the right answer in each object; needed by --rm-type and sft_loss")
    rm_type: Literal["arithmetic", "exact_match", "numeric"] | None = option(
        None,
        "built-in reward. arithmetic: the share of characters in their right place, the embedded task's own. "
        "exact_match: 1 where the response equals the label, else 0. numeric: 1 where the last number in the "
        "response equals the label's, else 0",
    )
    custom_rm_path: str | None = plugin(
        "own reward, called as function(args, sample), which may be async; takes precedence over --rm-type"
    )
    reward_key: str | None = option(None, "which entry to train on where a reward is a mapping")
    custom_reward_post_process_path: str | None = plugin(
        "own reward normalisation, called as function(args, samples); returns (raw_rewards, rewards)"
    )
    custom_convert_samples_to_train_data_path: str | None = plugin(
        "own conversion, called as function(args, samples); returns the dictionary of training columns"
    )


@dataclass
class BatchOptions:
    """A rollout is split into optimizer steps, a step into micro-batches.

    A rollout has --rollout-batch-size x --n-samples-per-prompt samples. Micro-batches change memory and speed, never
    the result.
    """

    global_batch_size: int = option(
        None,
        "samples (not prompts) in one optimizer step, over all processes. Unset: from --num-steps-per-rollout. With "
        "--prompt-groups ragged about so many",
    )
    num_steps_per_rollout: int = option(
        None,
        "optimizer steps in each rollout. Unset: from --global-batch-size; 1 if that is unset too. With "
        "--prompt-groups ragged a rollout of fewer samples has fewer",
    )
    micro_batch_size: int = option(None, "samples in one forward pass of one process. " + _unset("micro_batch_size"))
    use_dynamic_batch_size: bool = option(
        False, "pack micro-batches by tokens, up to --max-tokens-per-gpu, in place of --micro-batch-size"
    )
    max_tokens_per_gpu: int | None = option(
        None, "token budget (prompt and response) of one micro-batch, for --use-dynamic-batch-size"
    )
    balance_data: bool = option(False, "balance each step's tokens over the data-parallel ranks")
    log_probs_chunk_size: int = option(
        -1,
        "tokens per chunk when log-probs are computed from logits; fewer take less memory and more time. -1 chooses "
        "chunks that take little of both",
    )


@dataclass
class DumpOptions:
    """Rollouts kept on disk. `{rollout_id}` in a path is replaced by the rollout's number."""

    save_debug_rollout_data: str | None = option(None, "write each rollout's samples here", metavar="FILE.pt")
    load_debug_rollout_data: str | None = option(
        None, "train on samples from such a file and sample none", metavar="FILE.pt"
    )
