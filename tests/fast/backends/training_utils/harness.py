"""Runs any split of a step through the layer in one process, one simulated rank after the other.

A split is `ranks -> micro-batches -> row indices`. What a micro-batch contributes depends on its rows and on the shape
of the split (ranks, micro-batches) alone, so each contribution is computed once and every split put together from them
as the backend would: that makes all splits of a few rows affordable.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch

from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.loss_hub.losses import get_pg_loss_reducer
from miles.backends.training_utils.parallel import GroupInfo, set_parallel_state
from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
from tests.fast import oracle
from tests.fast.backends.training_utils.layout import chunk_positions, local_response, samples_of, simulated_state
from tests.fast.oracle import Row

Split = list[list[list[int]]]
BACKENDS = ("fsdp", "megatron")
HERE = "tests.fast.backends.training_utils.harness"


def step_counts(rows: Sequence[Row]) -> StepCounts:
    """The step's totals, by the oracle's loops."""
    return StepCounts(
        num_samples=len(oracle.rollouts(rows)),
        num_prompts=len(oracle.groups(rows)),
        num_tokens=oracle.num_tokens(rows),
    )


def train_data_of(args: Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    """The rows through the package's conversion."""
    data = convert_samples_to_train_data(args, samples_of(rows), {}, None, None)
    data.setdefault("total_lengths", [row.total_length for row in rows])
    return data


@dataclass
class Packed:
    """A micro-batch and the autograd leaves behind it: `leaves[row][t]` is the parameter of one response token."""

    batch: dict[str, Any]
    logits: torch.Tensor
    leaves: dict[int, torch.Tensor]


PER_ROW = ("prompt_mask_sums", "rollout_mask_sums", "prompt_group_indices", "rollout_counts", "prompt_counts")


def _logits(
    rows: dict[int, Row], leaves: dict[int, torch.Tensor], args: Namespace, cp: GroupInfo, target: dict[int, list[int]]
) -> tuple[torch.Tensor, list[int]]:
    """Packed logits `[1, T, V]` that hold the leaves where their tokens are predicted, and those positions."""
    vocab = 1 if args.loss_type == "custom_loss" else 8
    pieces, index, start = [], [], 0
    for i, row in rows.items():
        length = len(chunk_positions(row.total_length, cp.rank, cp.size))
        piece = torch.zeros(length, vocab)
        owned = local_response(row, cp.rank, cp.size)
        if owned:
            storage = torch.tensor([s for s, _ in owned])
            tokens = torch.tensor([t for _, t in owned])
            channel = tokens * 0 if vocab == 1 else torch.tensor(target[i])[tokens + row.prompt_length]
            piece = piece.index_put((storage, channel), leaves[i][tokens])
            index += [start + s for s, _ in owned]
        pieces.append(piece)
        start += length
    packed = torch.cat(pieces) if pieces else torch.zeros(1, vocab)
    return packed[None].requires_grad_() if not packed.requires_grad else packed[None], index


def pack(
    args: Namespace,
    rows: Sequence[Row],
    data: dict[str, Any],
    indices: Sequence[int],
    cp: GroupInfo,
) -> Packed:
    """Lay the rows out as the data room does, with ratio 1 and advantage `-value` so that pg loss is the value."""
    chosen = {i: rows[i] for i in indices}
    linear = args.loss_type == "custom_loss"
    leaves = {
        i: torch.tensor([float(x) if linear else 0.0 for x in row.values], requires_grad=True)
        for i, row in chosen.items()
    }
    logits, response_index = _logits(chosen, leaves, args, cp, {i: data["tokens"][i] for i in chosen})
    local = {i: [t for _, t in local_response(row, cp.rank, cp.size)] for i, row in chosen.items()}
    uniform = -torch.log(torch.tensor(8.0)).item()
    batch = {
        "unconcat_tokens": [torch.tensor(data["tokens"][i]) for i in chosen],
        "tokens": torch.zeros(1, logits.size(1), dtype=torch.int64),
        "total_lengths": [row.total_length for row in chosen.values()],
        "response_lengths": [row.response_length for row in chosen.values()],
        "loss_masks": [torch.tensor(row.mask, dtype=torch.int64) for row in chosen.values()],
        "log_probs": [torch.full((len(local[i]),), uniform) for i in chosen],
        "advantages": [torch.tensor([-float(row.values[t]) for t in local[i]]) for i, row in chosen.items()],
        "step_counts": step_counts(rows),
        "response_index": torch.tensor(response_index, dtype=torch.int64),
        "row_ids": list(chosen),
    }
    for key in PER_ROW:
        if key in data:
            batch[key] = torch.tensor([data[key][i] for i in chosen], dtype=torch.int64)
    return Packed(batch, logits, leaves)


def linear_loss(args, batch, logits, sum_of_sample_mean):
    """A custom loss whose per-token value is the parameter itself, so that the gradient is the token's weight."""
    reducer = get_pg_loss_reducer(
        args,
        batch,
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        pg_loss_masks=batch["loss_masks"],
        max_seq_lens=None,
        default_reducer=sum_of_sample_mean,
    )
    loss = reducer(logits[0, batch["response_index"], 0])
    return loss, {"loss": loss.detach().clone()}


LINEAR = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.linear_loss"}


def _gradient_of(leaf: torch.Tensor) -> list[float]:
    return [] if leaf.grad is None else leaf.grad.tolist()


@dataclass
class Outcome:
    """What a step comes to: the value and its gradient as the backend forms them, and the logged metrics."""

    value: float
    gradient: list[list[float]]
    metrics: dict[str, float]


@dataclass
class Engine:
    """Every split of one step under one backend, loss and context-parallel size.

    Attributes:
        change_batch: Edits each micro-batch before the loss sees it.
    """

    args: Namespace
    rows: Sequence[Row]
    backend: str = "fsdp"
    cp_size: int = 1
    data: dict[str, Any] | None = None
    change_batch: Callable[[dict[str, Any]], None] | None = None
    _cache: dict[tuple, tuple] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.data is None:
            self.data = train_data_of(self.args, self.rows)

    def contribution(self, indices: tuple[int, ...], dp_size: int, num_microbatches: int, cp_rank: int) -> tuple:
        """`(loss the backward sees, gradient by row, normalizer, log)` of one micro-batch on one rank."""
        key = (indices, dp_size, num_microbatches, cp_rank)
        if key not in self._cache:
            set_parallel_state(simulated_state(dp_size, self.cp_size, cp_rank=cp_rank))
            packed = pack(self.args, self.rows, self.data, indices, GroupInfo(cp_rank, self.cp_size))
            if self.change_batch is not None:
                self.change_batch(packed.batch)
            loss, normalizer, log = loss_function(
                self.args, packed.batch, num_microbatches, packed.logits, self.backend == "megatron"
            )
            assert loss.shape == () and loss.requires_grad, "every micro-batch anchors the graph, an empty one too"
            loss.backward()
            gradient = [(i, t, x) for i, leaf in packed.leaves.items() for t, x in enumerate(_gradient_of(leaf)) if x]
            self._cache[key] = (loss.item(), gradient, int(normalizer), log)
        return self._cache[key]

    def _scale(self, normalizer: int, num_microbatches: int) -> float:
        """What the backend multiplies a micro-batch's gradient by before it sums over all micro-batches and ranks."""
        if self.backend == "fsdp" or self.args.calculate_per_token_loss:
            return 1.0
        return 1.0 / (max(normalizer, 1) * num_microbatches)

    def _average(self, dp_size: int, total_normalizer: int) -> float:
        """What the backend divides the sum by: FSDP the DP mesh, Megatron DP x CP, or the tokens if per token."""
        if self.backend == "fsdp":
            return dp_size
        return total_normalizer if self.args.calculate_per_token_loss else dp_size * self.cp_size

    def run(self, split: Split) -> Outcome:
        """Put the step together; ranks with fewer micro-batches than the longest run empty ones."""
        dp_size, num_microbatches = len(split), max(1, *map(len, split))
        total, normalizers, logs = 0.0, 0, []
        gradient = [[0.0] * row.response_length for row in self.rows]
        for rank in split:
            for cp_rank in range(self.cp_size):
                for indices in [*rank, *[[]] * (num_microbatches - len(rank))]:
                    loss, grads, normalizer, log = self.contribution(
                        tuple(indices), dp_size, num_microbatches, cp_rank
                    )
                    scale = self._scale(normalizer, num_microbatches)
                    total += loss * scale
                    for i, t, x in grads:
                        gradient[i][t] += x * scale
                    normalizers += normalizer
                    logs.append(log)
        average = self._average(dp_size, normalizers)
        set_parallel_state(simulated_state(1, self.cp_size))
        return Outcome(total / average, [[x / average for x in row] for row in gradient], aggregate_train_losses(logs))


def set_partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to split the items into non-empty micro-batches, each way once."""
    if not items:
        yield []
        return
    first, others = items[0], items[1:]
    for size in range(len(others) + 1):
        for company in combinations(others, size):
            for rest in set_partitions([item for item in others if item not in company]):
                yield [[first, *company], *rest]


def all_splits(num_rows: int, max_ranks: int = 2) -> Iterator[Split]:
    """All ways to deal rows to up to `max_ranks` ranks (some may get none) and there into micro-batches."""
    for dp_size in range(1, max_ranks + 1):
        for owners in product(range(dp_size), repeat=num_rows):
            held = [[row for row in range(num_rows) if owners[row] == rank] for rank in range(dp_size)]
            for split in product(*map(set_partitions, held)):
                yield list(split)


def backwards(split: Split) -> Split:
    """The same split with ranks, micro-batches and the rows in them in the other order."""
    return [[batch[::-1] for batch in rank[::-1]] for rank in split[::-1]]
