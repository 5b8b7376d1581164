"""One process's part in a step: the way of `TrainActor.train` up to the gradient, which is taken instead of used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from miles.backends.training_utils.backend import open_backend
from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp
from miles.backends.training_utils.data import get_data_iterator, move_to_device
from miles.backends.training_utils.log_utils import log_rollout_data
from miles.backends.training_utils.loss import compute_advantages_and_returns
from miles.backends.training_utils.parallel import get_parallel_state
from miles.backends.training_utils.step_totals import is_left_empty, prepare_loss_terms
from miles.backends.training_utils.train_actor import ARCHITECTURE_ARGUMENTS, TrainActor, needs_old_log_probs
from miles.testing.step import PAD_TOKEN_ID, SKIPPED_VALUE, VOCAB_SIZE
from miles.testing.train_data import TOKEN_COLUMNS
from miles.utils.options import Options

Prepared = tuple[Options, list[dict[str, Any]]]
GatherGradient = Callable[[TrainActor], dict[str, torch.Tensor]]


def run_jobs_on_rank(jobs: Sequence[Prepared], gather_gradient: GatherGradient) -> list[tuple[float, Any, Any]]:
    """Return (value, gradient as arrays, metrics) of each job; every rank of a world calls this with the same jobs.

    Args:
        jobs: Arguments of each, of one topology, and the shards of all data-parallel ranks.
        gather_gradient: Makes the whole gradient of an actor.
    """
    actors: dict[tuple[Any, ...], TrainActor] = {}
    results = []
    with open_backend(jobs[0][0]) as (world, make_actor):
        for args, shards in jobs:
            # What an actor is built from; everything else it reads from its arguments at each step.
            key = (args.calculate_per_token_loss, args.seed, *(getattr(args, name) for name in ARCHITECTURE_ARGUMENTS))
            if key not in actors:
                actors[key] = make_actor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=PAD_TOKEN_ID)
            actor = actors[key]
            actor.args = args
            metrics = run_step(actor, shards[get_parallel_state().intra_dp.rank])
            gradient = {} if "skipped_steps" in metrics else gather_gradient(actor)
            arrays = {name: part.cpu().numpy() for name, part in gradient.items()}
            results.append((metrics.get("loss", SKIPPED_VALUE), arrays, metrics))
    return results


def run_step(actor: TrainActor, shard: dict[str, Any]) -> dict[str, float]:
    """Compute one step's gradient as `TrainActor.train` does, from the columns that the shard already has."""
    args = actor.args
    data = move_to_device(shard, actor.world.device)
    given = {name: _local_rows(data, data.pop(name)) for name in TOKEN_COLUMNS if name in data}
    iterators, num_microbatches = get_data_iterator(args, None, data)
    if "log_probs" not in given and args.loss_type == "policy_loss" and needs_old_log_probs(args):
        data.update(actor._compute_log_probs(iterators, num_microbatches, store_prefix=""))
        for iterator in iterators:
            iterator.reset()
    compute_advantages_and_returns(args, data)
    data.update(given)
    prepare_loss_terms(args, data, iterators, num_microbatches)
    described = actor._describe_steps(data, iterators, num_microbatches)
    rollout_metrics = actor._sync_metrics(log_rollout_data(0, args, data))
    (facts,), (total,) = described, num_microbatches
    if is_left_empty(args, facts):
        return {"skipped_steps": 1.0, **facts, **rollout_metrics}
    metrics, grad_norm = actor._compute_gradients(iterators, total)
    return {**metrics, **facts, "grad_norm": grad_norm, **rollout_metrics}


def _local_rows(data: dict[str, Any], column: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    """Return a per-token column as this context-parallel rank holds it."""
    return [
        slice_log_prob_with_cp(torch.tensor(values, dtype=torch.float32), total_length, response_length)
        for values, total_length, response_length in zip(
            column, data["total_lengths"], data["response_lengths"], strict=True
        )
    ]
