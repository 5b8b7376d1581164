"""Options of the model, its parallelism, its optimizer, and what a run keeps and where."""

from dataclasses import dataclass
from typing import Literal

from miles.utils.options.declare import option

TRACKING = ("jsonl", "tensorboard", "wandb")
"""Values of `--tracking`; the first is always on."""


@dataclass
class ModelOptions:
    """The policy: a decoder-only language model, trained from scratch."""

    train_backend: Literal["fsdp", "megatron"] = option(
        "fsdp",
        "fsdp: PyTorch FSDP2. megatron: Megatron-Core (extra `megatron`), with tensor, pipeline and context "
        "parallelism. Both on CPU (gloo) or GPU (NCCL), one process or several",
    )
    hidden_size: int = option(64, "width of the residual stream")
    num_layers: int = option(2, "transformer blocks")
    num_attention_heads: int = option(4, "attention heads; must divide --hidden-size")
    max_position_embeddings: int = option(2048, "longest sequence (prompt and response), in tokens")
    tokenizer_type: Literal["auto", "byte", "arithmetic"] = option(
        "auto",
        "byte: UTF-8 bytes, for any text. arithmetic: the few characters of the embedded task. auto: byte where "
        "prompts or samples come from a file, else arithmetic",
    )
    qkv_format: Literal["thd"] = option(
        "thd", "layout of a micro-batch: thd packs its rows into one sequence without padding"
    )


@dataclass
class ParallelOptions:
    """For --train-backend megatron. Processes beyond the product of the three sizes are data parallel."""

    tensor_model_parallel_size: int = option(
        1, "processes that split each layer's matrices and the vocabulary; must divide --num-attention-heads"
    )
    pipeline_model_parallel_size: int = option(
        1, "processes that split the layers into stages; must divide --num-layers"
    )
    context_parallel_size: int = option(1, "processes that split each sequence (zigzag)")
    virtual_pipeline_model_parallel_size: int | None = option(
        None, "stages on each pipeline process (interleaved schedule); at least 2. Unset: one"
    )
    use_distributed_optimizer: bool = option(False, "shard optimizer state over the data-parallel processes")
    overlap_grad_reduce: bool = option(False, "reduce gradients while the backward pass still runs")


@dataclass
class OptimizerOptions:
    """AdamW (arXiv:1711.05101). Schedules count optimizer steps."""

    lr: float = option(2e-3, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of a linear or cosine decay")
    lr_warmup_iters: int = option(0, "optimizer steps over which the learning rate rises linearly to --lr")
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "how the learning rate goes from --lr to --min-lr between warm-up and the run's last step (the "
        "--num-rollout x --num-steps-per-rollout-th, whatever steps --prompt-groups ragged makes)",
    )
    weight_decay: float = option(0.0, "decoupled weight decay, per step")
    adam_beta1: float = option(0.9, "decay of the gradient's running mean")
    adam_beta2: float = option(0.95, "decay of the squared gradient's running mean")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    clip_grad: float = option(1.0, "largest global gradient norm (L2); 0 turns clipping off")
    seed: int = option(1234, "seed of the initial weights")


@dataclass
class RunOptions:
    """Where a run's files go, and how it continues."""

    output_dir: str | None = option(
        None,
        "metrics.jsonl, args.json, train.log and the files of --tracking go here. Unset: runs/<time>-<mode>",
        metavar="DIR",
    )
    save: str | None = option(None, "write checkpoints here", metavar="DIR")
    save_interval: int | None = option(
        None, "rollouts between two checkpoints; needs --save. Unset: one at the end of the run"
    )
    load: str | None = option(
        None, "continue from the newest checkpoint here; where there is none yet, start from scratch", metavar="DIR"
    )
    ref_load: str | None = option(
        None, "checkpoint of the reference model of --use-kl-loss. Unset: the weights that --seed draws", metavar="DIR"
    )
    custom_config_path: str | None = option(
        None,
        "a mapping that overrides the command line: options by their names with underscores (lr, loss_aggregation); "
        "any other key becomes an argument of custom functions",
        metavar="FILE.yaml",
    )


@dataclass
class TrackingOptions:
    """Each optimizer step's metrics are a line of metrics.jsonl in --output-dir, and in the tools named here.

    W&B takes its API key from `wandb login` or WANDB_API_KEY.
    """

    # No choices: validation reports an unknown name in the same words from the command line and from YAML.
    tracking: list[str] = option(
        None,
        "one or several. jsonl: metrics.jsonl, always on. tensorboard: event files in OUTPUT_DIR/tensorboard (extra "
        "`tensorboard`). wandb: Weights & Biases, its files in OUTPUT_DIR/wandb (extra `wandb`)",
        metavar="{" + ",".join(TRACKING) + "}",
    )
    wandb_project: str | None = option(None, "W&B project. Unset: WANDB_PROJECT, else miles")
    wandb_team: str | None = option(None, "W&B entity. Unset: the account's own")
    wandb_group: str | None = option(None, "group of the run, such as the seeds of one setting")
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(
        None,
        "online: upload. offline: files only, for `wandb sync` later. disabled: nothing. Unset: WANDB_MODE, else "
        "online",
    )
    wandb_run_id: str | None = option(
        None,
        "the W&B run to continue or make. Unset: a resumed run in the same --output-dir continues its own, any "
        "other makes one",
        metavar="ID",
    )
