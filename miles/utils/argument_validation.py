"""Resolution and rules of every option but the loss aggregation's (`loss_aggregation_args.py`)."""

import dataclasses
import logging
import math
from collections.abc import Callable

from miles.utils.errors import UserError
from miles.utils.misc import dump_path, load_function
from miles.utils.options import Options
from miles.utils.options.data import TASK_DEPENDENT_DEFAULTS
from miles.utils.options.declare import PLUGIN, choices, option_string

logger = logging.getLogger(__name__)

LARGEST_SEED = 2**63 - 1
"""torch's generators take a signed 64-bit integer."""

_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (
            *("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len"),
            *("global_batch_size", "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu"),
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("hidden_size", "num_layers", "num_attention_heads", "max_position_embeddings", "save_interval"),
        ),
    ),
    ("at least 2", lambda value: value >= 2, ("virtual_pipeline_model_parallel_size",)),
    ("positive", lambda value: value > 0, ("lr", "rollout_temperature", "adam_eps", "tis_clip")),
    (
        "zero or positive",
        lambda value: value >= 0,
        (
            *("min_lr", "lr_warmup_iters", "weight_decay", "clip_grad"),
            *("eps_clip", "eps_clip_high", "value_clip", "kl_loss_coef", "tis_clip_low"),
        ),
    ),
    (f"between 0 and {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED, ("seed", "rollout_seed")),
    ("any finite number", lambda value: True, ("entropy_coef",)),
    ("above 1", lambda value: value > 1, ("eps_clip_c",)),
    ("in [0, 1)", lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2")),
    ("-1 or at least 1", lambda value: value == -1 or value >= 1, ("log_probs_chunk_size",)),
)
"""Which values a numeric option admits. An unset option (None) is admitted; NaN and infinities never are."""


def resolve_batch_sizes(args: Options) -> None:
    """Derive `global_batch_size` and `num_steps_per_rollout` from each other, in place.

    `global_batch_size = rollout_batch_size * n_samples_per_prompt / num_steps_per_rollout`; with neither set, a
    rollout is one step.

    Raises:
        UserError: without ragged groups, the samples of a rollout cannot be split into equal steps, or both are set
            and disagree.
    """
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.prompt_groups == "ragged":
        _resolve_ragged_batch_sizes(args, num_samples)
        return
    product = f"rollout_batch_size {args.rollout_batch_size} * n_samples_per_prompt {args.n_samples_per_prompt}"
    num_steps, batch_size = args.num_steps_per_rollout, args.global_batch_size
    if num_steps is not None and batch_size not in (None, num_samples // num_steps):
        raise UserError(
            f"global_batch_size {batch_size} is not equal to {product} // num_steps_per_rollout {num_steps}, which is "
            f"{num_samples // num_steps}; set only one of --global-batch-size and --num-steps-per-rollout"
        )
    if num_steps is not None and num_samples % num_steps:
        raise UserError(
            f"num_steps_per_rollout {num_steps} does not divide {product} = {num_samples} samples; "
            "choose a divisor, so that every step has equally many samples"
        )
    if batch_size is not None and num_samples % batch_size:
        raise UserError(
            f"global_batch_size {batch_size} does not divide {product} = {num_samples} samples; "
            "choose a divisor, so that no sample of a rollout is left over"
        )
    args.global_batch_size = batch_size or num_samples // (num_steps or 1)
    args.num_steps_per_rollout = num_samples // args.global_batch_size


def _resolve_ragged_batch_sizes(args: Options, num_samples: int) -> None:
    """Take both as about so many: what a rollout holds decides."""
    if args.global_batch_size is None:
        args.global_batch_size = max(1, round(num_samples / (args.num_steps_per_rollout or 1)))
    args.num_steps_per_rollout = max(1, round(num_samples / args.global_batch_size))


def resolve_task_args(args: Options) -> None:
    """Fill in the options whose default depends on what is trained, in place."""
    is_embedded = args.prompt_data is None and args.load_debug_rollout_data is None
    for name, (embedded, own) in TASK_DEPENDENT_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, embedded if is_embedded else own)


def resolve_policy_args(args: Options) -> None:
    """Fill in clipping and reward normalisation from what else is set, in place."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    is_alone = args.n_samples_per_prompt == 1 and args.prompt_groups == "complete"
    if is_alone and args.grpo_std_normalization:
        args.grpo_std_normalization = False
        logger.info("n_samples_per_prompt is 1: one reward has no standard deviation, grpo_std_normalization is off")


def validate_ranges(args: Options) -> None:
    """Check every numeric option against the values it admits.

    Raises:
        UserError: a value lies outside.
    """
    for words, admits, names in _RANGES:
        for name in names:
            value = getattr(args, name)
            if value is not None and not (-math.inf < value < math.inf and admits(value)):
                raise UserError(f"{option_string(name)} must be {words}; got {value}")


def validate_combinations(args: Options) -> None:
    """Check options that need, or exclude, each other.

    Raises:
        UserError: the first rule that is broken.
    """
    for broken, message in (*_combination_rules(args), *_parallel_rules(args)):
        if broken:
            raise UserError(message)


def _combination_rules(args: Options) -> list[tuple[bool, str]]:
    """Return (is broken, message) for each rule about several options."""
    is_baseline = args.advantage_estimator == "reinforce_plus_plus_baseline"
    is_custom = args.loss_type == "custom_loss"
    return [
        (
            args.use_dynamic_batch_size and args.max_tokens_per_gpu is None,
            "--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch",
        ),
        (
            args.save_interval is not None and args.save is None,
            f"--save-interval {args.save_interval} needs --save, the directory for checkpoints",
        ),
        (
            args.use_tis and args.use_rollout_logprobs,
            "--use-tis and --use-rollout-logprobs exclude each other: where the rollout's log-probs are taken as the "
            "old policy's, every importance weight is 1; leave one out",
        ),
        (
            is_baseline and not args.normalize_advantages,
            "--advantage-estimator reinforce_plus_plus_baseline requires --normalize-advantages",
        ),
        (
            is_custom and args.custom_loss_function_path is None,
            "--loss-type custom_loss needs --custom-loss-function-path",
        ),
        (
            not is_custom and args.custom_loss_function_path is not None,
            f"--custom-loss-function-path needs --loss-type custom_loss; got --loss-type {args.loss_type}",
        ),
        (
            args.hidden_size % args.num_attention_heads != 0,
            f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads {args.num_attention_heads}",
        ),
        (
            args.tis_clip_low > args.tis_clip,
            f"--tis-clip-low {args.tis_clip_low} must not exceed --tis-clip {args.tis_clip}",
        ),
        (
            args.tis_type != "truncated" and args.tis_clip_low == args.tis_clip,
            f"--tis-type {args.tis_type} rejects what lies outside its bounds, so --tis-clip-low must be below "
            f"--tis-clip; both are {args.tis_clip}",
        ),
        (
            args.load_debug_rollout_data is None and args.rollout_max_response_len >= args.max_position_embeddings,
            f"--rollout-max-response-len {args.rollout_max_response_len} must be below --max-position-embeddings "
            f"{args.max_position_embeddings}, which has to hold the prompt too",
        ),
        (args.min_lr > args.lr, f"--min-lr {args.min_lr} must not exceed --lr {args.lr}"),
    ]


def _parallel_rules(args: Options) -> list[tuple[bool, str]]:
    """Return (is broken, message) for each rule about how one copy of the model is split over processes."""
    given = [
        option_string(name)
        for name, unset in (
            ("tensor_model_parallel_size", 1),
            ("pipeline_model_parallel_size", 1),
            ("context_parallel_size", 1),
            ("virtual_pipeline_model_parallel_size", None),
            ("use_distributed_optimizer", False),
            ("overlap_grad_reduce", False),
        )
        if getattr(args, name) != unset
    ]
    tp, pp, vpp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
    )
    return [
        (
            args.train_backend != "megatron" and bool(given),
            f"{', '.join(given)}: for --train-backend megatron only; got --train-backend {args.train_backend}",
        ),
        (
            args.num_attention_heads % tp != 0,
            f"--num-attention-heads {args.num_attention_heads} must be a multiple of --tensor-model-parallel-size "
            f"{tp}",
        ),
        (
            vpp is not None and pp == 1,
            f"--virtual-pipeline-model-parallel-size {vpp} needs --pipeline-model-parallel-size above 1",
        ),
        (
            args.num_layers % (pp * (vpp or 1)) != 0,
            f"--num-layers {args.num_layers} must be a multiple of the number of stages, "
            f"--pipeline-model-parallel-size {pp}"
            + (f" x --virtual-pipeline-model-parallel-size {vpp}" if vpp else ""),
        ),
    ]


def validate_data(args: Options) -> None:
    """Check that own prompts have a reward and a label, and that a dump's path has no field but `{rollout_id}`.

    Raises:
        UserError: something is missing, or the path has another field.
    """
    if args.prompt_data is not None and args.load_debug_rollout_data is None:
        _check_prompt_options(args)
    for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
        template = getattr(args, name)
        if template is not None:
            try:
                dump_path(template, 0)
            except UserError as error:
                raise UserError(f"{option_string(name)}: {error}") from error


def _check_prompt_options(args: Options) -> None:
    """Check that prompts from a file come with what the loss learns from: a label to imitate, or a reward."""
    if args.loss_type == "sft_loss":
        if args.label_key is None:
            raise UserError("--loss-type sft_loss on --prompt-data needs --label-key, the text to learn")
    elif args.rm_type is None and args.custom_rm_path is None:
        raise UserError(
            f"--prompt-data needs a reward: --custom-rm-path, or --rm-type {{{','.join(choices(Options, 'rm_type'))}}}"
        )
    elif args.custom_rm_path is None and args.label_key is None:
        raise UserError(f"--rm-type {args.rm_type} needs --label-key, the right answer to compare with")


def validate_plugins(args: Options) -> None:
    """Import the function behind every plug-in, so that a wrong path fails before anything is computed.

    Raises:
        UserError: a path does not import or is not callable.
    """
    for field in dataclasses.fields(Options):
        path = getattr(args, field.name)
        if field.metadata["metavar"] != PLUGIN or path is None:
            continue
        try:
            load_function(path)
        except UserError as error:
            raise UserError(f"{option_string(field.name)}: {error}") from error
