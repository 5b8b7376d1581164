"""The whole walk in one process: conversion, split, tensors, schedule, packed batches, loss, aggregation.

Ranks run one after the other. Where they would meet in a collective, a rehearsal first notes what each brings, so that
in the performance every rank gets the real total without waiting for the others.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils import data as data_room
from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss import compute_advantages_and_returns, loss_function
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.ray.rollout.train_data_conversion import process_rollout_data_shard, split_train_data_by_dp
from tests.fast.backends.training_utils.harness import Outcome, train_data_of
from tests.fast.backends.training_utils.layout import chunk_positions, local_response, simulated_state
from tests.fast.oracle import Row


@dataclass
class Ledger:
    """What each rank brought to each collective of the rehearsal, in order."""

    brought: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    rehearsing: bool = True

    def reduce(self, rank: int, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.rehearsing:
            self.brought.setdefault(rank, []).append(tensor.clone())
            return tensor
        turn = self.seen.get(rank, 0)
        self.seen[rank] = turn + 1
        everyone = torch.stack([tensors[turn] for tensors in self.brought.values()])
        return everyone.amax(0) if op == dist.ReduceOp.MAX else everyone.sum(0)


@dataclass(frozen=True)
class RehearsedAxis(GroupInfo):
    """An axis whose totals come from the ledger."""

    ledger: Ledger | None = None

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        return self.ledger.reduce(self.rank, tensor, op)


def _state(ledger: Ledger, dp_rank: int, dp_size: int) -> ParallelState:
    axis = RehearsedAxis(dp_rank, dp_size, ledger=ledger)
    return ParallelState(intra_dp=axis, intra_dp_cp=axis)


def _schedule(args: Namespace, shard: dict[str, Any]) -> tuple[dict[str, Any], data_room.DataIterator, list[int]]:
    batch = data_room.move_to_device(process_rollout_data_shard(args, dict(shard)), "cpu")
    compute_advantages_and_returns(args, batch)
    iterators, num_microbatches = data_room.get_data_iterator(args, None, batch)
    assert len(iterators) == 1
    return batch, iterators[0], num_microbatches


def schedules(args: Namespace, rows: Sequence[Row], dp_size: int) -> list[tuple]:
    """Every rank's `(rank state, batch, iterator, micro-batches per step)`."""
    shards = split_train_data_by_dp(args, train_data_of(args, rows), dp_size)
    ledger = Ledger()
    for rank, shard in enumerate(shards):
        set_parallel_state(_state(ledger, rank, dp_size))
        _schedule(args, shard)
    ledger.rehearsing = False
    performed = []
    for rank, shard in enumerate(shards):
        set_parallel_state(_state(ledger, rank, dp_size))
        performed.append((simulated_state(dp_size, 1, dp_rank=rank), *_schedule(args, shard)))
    return performed


def sample_ids(batch: dict[str, Any]) -> list[int]:
    """The rows of a micro-batch, without the blank one that stands in for none."""
    return [index for index in batch["sample_indices"] if index is not None]


def _logits(batch: dict[str, Any], rows: Sequence[Row], leaves: list[torch.Tensor]) -> torch.Tensor:
    """Fill the packed positions of the batch with the rows' leaves, and note them for `linear_loss`."""
    assert batch["tokens"].shape == batch["position_ids"].shape
    pieces, index, start = [], [], 0
    for i in sample_ids(batch):
        length = len(chunk_positions(rows[i].total_length, 0, 1))
        piece = torch.zeros(length, 1)
        owned = local_response(rows[i], 0, 1)
        piece = piece.index_put((torch.tensor([s for s, _ in owned], dtype=torch.int64), torch.tensor([0])), leaves[i])
        pieces.append(piece)
        index += [start + s for s, _ in owned]
        start += length
    batch["response_index"] = torch.tensor(index, dtype=torch.int64)
    packed = torch.cat(pieces)[None] if pieces else torch.zeros(1, 1, 1, requires_grad=True)
    assert packed.shape[:2] == batch["tokens"].shape
    return packed


def run_pipeline(
    args: Namespace, rows: Sequence[Row], dp_size: int, megatron: bool = False
) -> list[tuple[list[int], Outcome]]:
    """`(row ids, outcome)` of each optimizer step, under a linear loss over the rows' values."""
    ranks = schedules(args, rows, dp_size)
    steps = []
    for step, num_microbatches in enumerate(ranks[0][3]):
        leaves = [torch.tensor([float(x) for x in row.values], requires_grad=True) for row in rows]
        total, normalizers, logs, seen = 0.0, 0, [], []
        for state, _, iterator, per_step in ranks:
            assert per_step[step] == num_microbatches, "ranks agree on the number of micro-batches"
            set_parallel_state(state)
            for _ in range(num_microbatches):
                batch = data_room.get_batch(iterator)
                logits = _logits(batch, rows, leaves)
                loss, normalizer, log = loss_function(args, batch, num_microbatches, logits, megatron)
                if megatron and not args.calculate_per_token_loss:
                    loss = loss / (max(int(normalizer), 1) * num_microbatches)
                loss.backward()
                total += loss.item()
                normalizers += int(normalizer)
                logs.append(log)
                seen += sample_ids(batch)
        average = normalizers if megatron and args.calculate_per_token_loss else dp_size
        set_parallel_state(simulated_state(1, 1))
        gradient = [
            [0.0] * row.response_length if leaf.grad is None else (leaf.grad / average).tolist()
            for row, leaf in zip(rows, leaves, strict=True)
        ]
        steps.append((sorted(seen), Outcome(total / average, gradient, aggregate_train_losses(logs))))
    return steps
