"""One training step of a table of logits through a host, with its own schedule, loss, scaling and logs.

The model is a table: row `id` holds the logits of what follows token `id`. Every token of every sample has its own id,
so the gradient of one table entry is the gradient of one token of one sample, whichever micro-batch, rank or
context-parallel slice it went through.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from host import Host
from oracle import Row, groups, rollouts
from torch.distributed.fsdp import fully_shard

PADDED = 1  # id 0 is what the hosts pad with


@dataclass(frozen=True)
class Plan:
    """What to run, in plain data: rows in rollout order, how they are cut, and the numbers of the policy loss.

    Attributes:
        flags: Command line of the host, beside the sizes that follow from the rows.
        advantages: One per response token, row by row.
        old_log_probs: The same; the rollout's.
        table: Logits `[V, V]`; zeros (every token equally likely) if None.
        num_steps: Optimizer steps that the rows are cut into.
        overrides: Set on the namespace after the host validated it, for what would ask for files.
        columns: Further per-token values of the train data by name, such as `ref_log_probs`.
    """

    backend: str
    dp_size: int
    cp_size: int
    rows: tuple[Row, ...]
    flags: tuple[str, ...]
    advantages: tuple[tuple[float, ...], ...]
    old_log_probs: tuple[tuple[float, ...], ...]
    table: torch.Tensor | None = None
    num_steps: int = 1
    overrides: tuple[tuple[str, Any], ...] = ()
    columns: tuple[tuple[str, tuple[tuple[float, ...], ...]], ...] = ()


@dataclass
class Outcome:
    """What the host made of a plan.

    By optimizer step the gradients `[V, V]` and the logged metrics; the rollout log; what it converted samples to.
    """

    gradients: list[np.ndarray] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    rollout_log: dict[str, float] = field(default_factory=dict)
    train_data: dict[str, Any] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)


def first_ids(rows: Sequence[Row]) -> list[int]:
    """Id of each row's first token; its token t is that plus t."""
    starts = [PADDED]
    for row in rows:
        starts.append(starts[-1] + row.total_length)
    return starts


def vocabulary(rows: Sequence[Row]) -> int:
    return first_ids(rows)[-1]


def entries(rows: Sequence[Row]) -> list[list[tuple[int, int]]]:
    """Table entry of each response token: (id before it, its id)."""
    return [
        [(start + row.prompt_length + t - 1, start + row.prompt_length + t) for t in range(row.response_length)]
        for start, row in zip(first_ids(rows), rows, strict=False)
    ]


def samples_of(host: Host, plan: Plan) -> list[Any]:
    """The rows as the host's samples."""
    starts = first_ids(plan.rows)
    made = []
    for i, row in enumerate(plan.rows):
        sample = host.Sample(
            group_index=row.group,
            index=i,
            tokens=list(range(starts[i], starts[i] + row.total_length)),
            response_length=row.response_length,
            reward=float((i if row.rollout is None else row.rollout) % 3),
            loss_mask=list(row.mask),
            status=host.Sample.Status.COMPLETED,
            rollout_log_probs=list(plan.old_log_probs[i]),
        )
        if row.rollout is not None and hasattr(sample, "rollout_id"):
            sample.rollout_id = row.rollout
        made.append(sample)
    return made


def arguments(host: Host, plan: Plan) -> Namespace:
    """The host's namespace under which the rows are `plan.num_steps` optimizer steps."""
    num_rollouts = len(rollouts(plan.rows)) if has_rollouts(host, plan.backend) else len(plan.rows)
    num_groups = len(groups(plan.rows))
    sizes = {
        "--rollout-batch-size": num_groups,
        "--n-samples-per-prompt": max(num_rollouts // num_groups, 1),
        "--global-batch-size": num_rollouts // plan.num_steps,
        "--context-parallel-size": plan.cp_size,
        "--data-pad-size-multiplier": 2,
    }
    given = [str(x) for pair in sizes.items() for x in pair]
    args = host.parse(plan.backend, *given, "--use-rollout-logprobs", *plan.flags)
    for name, value in plan.overrides:
        setattr(args, name, value)
    return args


def has_rollouts(host: Host, backend: str) -> bool:
    """Whether the host's backend knows rollouts that are stored as several rows; with FSDP none does so far."""
    return backend == "megatron" and "rollout_id" in getattr(host.Sample, "__dataclass_fields__", {})


class TokenTable(torch.nn.Module):
    """Logits `[1, T, V]` of token ids `[1, T]`, by look-up."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(table.clone())

    def set_input_tensor(self, tensor: Any) -> None:
        """Megatron's schedule hands over the previous pipeline stage's output; there is one stage."""

    def forward(self, input_ids: torch.Tensor, **ignored: Any) -> torch.Tensor:
        return torch.nn.functional.embedding(input_ids, self.weight)


class Transformers(torch.nn.Module):
    """A sharded model with the output of a Transformers model."""

    def __init__(self, sharded: torch.nn.Module) -> None:
        super().__init__()
        self.sharded = sharded

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.sharded(**inputs))


def _megatron_model(args: Namespace, table: torch.Tensor) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        context_parallel_size=args.context_parallel_size,
        calculate_per_token_loss=args.calculate_per_token_loss,
        finalize_model_grads_func=finalize_model_grads,
        use_cpu_initialization=True,
    )
    table_module = TokenTable(table)
    table_module.config = config
    table_module.model_type = ModelType.encoder_or_decoder
    table_module.share_embeddings_and_output_weights = False
    return [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), table_module)]


def run_rank(host: Host, plan: Plan) -> Outcome:
    """Run a plan on this rank of an open process group, from samples to logged metrics."""
    args = arguments(host, plan)
    host.set_up_ranks(args)
    size = vocabulary(plan.rows)
    table = torch.zeros(size, size) if plan.table is None else plan.table
    data = host.convert(args, samples_of(host, plan))
    handles = host.split(args, data, plan.dp_size, plan.cp_size)
    outcome = Outcome(train_data=dict(data), shards=[_plain(host.open(handle)) for handle in handles])
    shard = host.rollout_data(args, handles)
    _add_columns(host, args, plan, shard)

    def keep(gradient: torch.Tensor) -> bool:
        outcome.gradients.append(gradient.to(torch.float64).numpy().copy())
        return True

    optimizer = mock.MagicMock()
    if plan.backend == "megatron":
        outcome.rollout_log = host.log_rollout(args, shard)
        model = _megatron_model(args, table)
        weight = model[0].module.weight
        optimizer.step = lambda: (keep(weight.main_grad), 0.0, 0)
        outcome.metrics = host.megatron_steps(args, model, optimizer, shard)
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (plan.dp_size,))
        model = Transformers(fully_shard(TokenTable(table), mesh=mesh))
        optimizer.step = lambda: keep(model.sharded.weight.grad.full_tensor())
        optimizer.zero_grad = lambda **named: model.zero_grad()
        optimizer.param_groups = [{"lr": 0.0}]
        outcome.metrics, outcome.rollout_log = host.fsdp_steps(args, model, optimizer, shard)
    dist.barrier()
    return outcome


def _plain(shard: dict[str, Any]) -> dict[str, Any]:
    """A copy that can be sent and compared: tensors as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return [plain(item) for item in value] if isinstance(value, (list, tuple, range)) else value

    return {name: plain(value) for name, value in shard.items()}


def _add_columns(host: Host, args: Namespace, plan: Plan, shard: dict[str, Any]) -> None:
    """Give each row of the shard its per-token values, this context-parallel rank's slice of them."""
    row_of = {start: i for i, start in enumerate(first_ids(plan.rows))}
    indices = [row_of[int(tokens[0])] for tokens in shard["tokens"]]
    for name, values in (("advantages", plan.advantages), ("returns", plan.advantages), *plan.columns):
        shard[name] = [
            torch.as_tensor(
                host.slice_for_cp(args, list(values[i]), plan.rows[i].total_length, plan.rows[i].response_length),
                dtype=torch.float32,
            )
            for i in indices
        ]
