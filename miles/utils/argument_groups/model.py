"""Options of the model, its optimizer and where a run is kept."""

import argparse
from importlib import metadata

from miles.utils.argument_groups.common import reset_arg
from miles.utils.argument_groups.embedded import EMBEDDED_TASK_DEFAULTS as EMBEDDED


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shape of the policy and the back end that trains it."""
    group = parser.add_argument_group("model", "The policy: a decoder-only language model, trained from scratch.")
    reset_arg(
        group,
        "--train-backend",
        type=str,
        choices=["fsdp", "megatron"],
        default="fsdp",
        help="fsdp: PyTorch FSDP2. megatron: Megatron-Core (extra `megatron`), with tensor, pipeline and context "
        "parallelism. Both on CPU (gloo) or GPU (NCCL), one process or several",
    )
    reset_arg(group, "--hidden-size", type=int, default=EMBEDDED["hidden_size"], help="width of the residual stream")
    reset_arg(group, "--num-layers", type=int, default=EMBEDDED["num_layers"], help="transformer blocks")
    reset_arg(
        group,
        "--num-attention-heads",
        type=int,
        default=EMBEDDED["num_attention_heads"],
        help="attention heads; must divide --hidden-size",
    )
    reset_arg(
        group,
        "--max-position-embeddings",
        type=int,
        default=EMBEDDED["max_position_embeddings"],
        help="longest sequence (prompt and response), in tokens",
    )
    reset_arg(
        group,
        "--tokenizer-type",
        type=str,
        choices=["auto", "byte", "arithmetic"],
        default="auto",
        help="byte: UTF-8 bytes, for any text. arithmetic: the few characters of the embedded task. auto: byte where "
        "prompts or samples come from a file, else arithmetic",
    )
    reset_arg(
        group,
        "--qkv-format",
        type=str,
        choices=["thd"],
        default="thd",
        help="layout of a micro-batch: thd packs its rows into one sequence without padding",
    )


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add AdamW and the learning-rate schedule."""
    group = parser.add_argument_group("optimizer", "AdamW (arXiv:1711.05101). Schedules count optimizer steps.")
    reset_arg(group, "--lr", type=float, default=EMBEDDED["lr"], help="peak learning rate")
    reset_arg(group, "--min-lr", type=float, default=0.0, help="learning rate at the end of a linear or cosine decay")
    reset_arg(
        group,
        "--lr-warmup-iters",
        type=int,
        default=EMBEDDED["lr_warmup_iters"],
        help="optimizer steps over which the learning rate rises linearly to --lr",
    )
    reset_arg(
        group,
        "--lr-decay-style",
        type=str,
        choices=["constant", "linear", "cosine"],
        default="constant",
        help="how the learning rate goes from --lr to --min-lr between warm-up and the run's last step (the "
        "--num-rollout x --num-steps-per-rollout-th, whatever steps --prompt-groups ragged makes)",
    )
    reset_arg(
        group, "--weight-decay", type=float, default=EMBEDDED["weight_decay"], help="decoupled weight decay, per step"
    )
    reset_arg(group, "--adam-beta1", type=float, default=0.9, help="decay of the gradient's running mean")
    reset_arg(group, "--adam-beta2", type=float, default=0.95, help="decay of the squared gradient's running mean")
    reset_arg(group, "--adam-eps", type=float, default=1e-8, help="added to the root of the second moment")
    reset_arg(
        group,
        "--clip-grad",
        type=float,
        default=EMBEDDED["clip_grad"],
        help="largest global gradient norm (L2); 0 turns clipping off",
    )
    reset_arg(group, "--seed", type=int, default=1234, help="seed of the initial weights")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where results go, checkpoints, and the YAML file of overrides."""
    group = parser.add_argument_group("run and checkpoints", "Where a run's files go, and how it continues.")
    reset_arg(
        group,
        "--output-dir",
        type=str,
        default=None,
        metavar="DIR",
        help="metrics.jsonl, args.json, train.log and the files of --tracking go here. Unset: runs/<time>-<mode>",
    )
    reset_arg(group, "--save", type=str, default=None, metavar="DIR", help="write checkpoints here")
    reset_arg(
        group,
        "--save-interval",
        type=int,
        default=None,
        help="rollouts between two checkpoints; needs --save. Unset: one at the end of the run",
    )
    reset_arg(
        group,
        "--load",
        type=str,
        default=None,
        metavar="DIR",
        help="continue from the newest checkpoint here; where there is none yet, start from scratch",
    )
    reset_arg(
        group,
        "--ref-load",
        type=str,
        default=None,
        metavar="DIR",
        help="checkpoint of the reference model of --use-kl-loss. Unset: the weights that --seed draws",
    )
    reset_arg(
        group,
        "--custom-config-path",
        type=str,
        default=None,
        metavar="FILE.yaml",
        help="a mapping that overrides the command line: options by their names with underscores (lr, "
        "loss_aggregation); any other key becomes an argument of custom functions",
    )
    reset_arg(
        group, "--version", action="version", version=f"miles {_get_version()}", help="print the version and exit"
    )


def _get_version() -> str:
    """Return the installed package's version; a clone that is run in place has none."""
    try:
        return metadata.version("miles")
    except metadata.PackageNotFoundError:
        return "(not installed)"
