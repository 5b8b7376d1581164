"""Options of where the metrics of a run go, beside `metrics.jsonl`."""

import argparse

from miles.utils.argument_groups.common import reset_arg

TRACKING = ("jsonl", "tensorboard", "wandb")
"""Values of `--tracking`; the first is always on."""


def add_tracking_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which tools show the metrics of a run, and W&B's names for it."""
    group = parser.add_argument_group(
        "tracking",
        "Each optimizer step's metrics are a line of metrics.jsonl in --output-dir, and in the tools named here. W&B "
        "takes its API key from `wandb login` or WANDB_API_KEY.",
    )
    # No argparse choices: validation reports an unknown name in the same words from the command line and from YAML.
    reset_arg(
        group,
        "--tracking",
        type=str,
        nargs="+",
        default=None,
        metavar="{" + ",".join(TRACKING) + "}",
        help="one or several. jsonl: metrics.jsonl, always on. tensorboard: event files in OUTPUT_DIR/tensorboard "
        "(extra `tensorboard`). wandb: Weights & Biases, its files in OUTPUT_DIR/wandb (extra `wandb`)",
    )
    reset_arg(group, "--wandb-project", type=str, default=None, help="W&B project. Unset: WANDB_PROJECT, else miles")
    reset_arg(group, "--wandb-team", type=str, default=None, help="W&B entity. Unset: the account's own")
    reset_arg(
        group, "--wandb-group", type=str, default=None, help="group of the run, such as the seeds of one setting"
    )
    reset_arg(
        group,
        "--wandb-mode",
        type=str,
        choices=["online", "offline", "disabled"],
        default=None,
        help="online: upload. offline: files only, for `wandb sync` later. disabled: nothing. Unset: WANDB_MODE, else "
        "online",
    )
    reset_arg(
        group,
        "--wandb-run-id",
        type=str,
        default=None,
        metavar="ID",
        help="the W&B run to continue or make. Unset: a resumed run in the same --output-dir continues its own, any "
        "other makes one",
    )
