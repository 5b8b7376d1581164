"""A step of any size through the real functions, all ranks of a simulated world in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from miles.backends.training_utils.data import DataIterator, get_data_iterator, get_step_counts, move_to_device
from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.step_totals import prepare_loss_terms
from miles.backends.training_utils.step_weights import describe_steps
from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    process_rollout_data_shard,
    split_train_data_by_dp,
)
from tests.fast.backends.training_utils import scaled_step
from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.backends.training_utils.meetings import Rank, World


@dataclass(frozen=True)
class Setting:
    """What is run."""

    world: World
    lengths: Sequence[tuple[int, int]]
    max_tokens: int
    is_rejecting: bool = False
    is_weighted: bool = False

    def arguments(self, mode: str, loss_type: str = "custom_loss") -> Any:
        return scaled_step.arguments(
            mode,
            len(self.lengths),
            max_tokens=self.max_tokens,
            is_rejecting=self.is_rejecting,
            loss_type=loss_type,
        )


@dataclass
class Result:
    """What a step came to.

    Attributes:
        counts: N, P and M on every rank.
        term_tokens: What the main term counts.
        num_microbatches: Of each rank.
        facts: What is said of the step under `prompt_mean`, the same on every rank.
        values: By mode, the value that gradients are taken of.
        sizes: By mode, the sum of the sizes of what was added up, the measure of rounding.
        gradient_sums: By mode, the sum of the gradient.
        gradient_products: By mode, the sum of each token's gradient times its value.
        metrics: By mode, "loss" as it is logged.
        payload: Bytes that a rank brings to each collective of the step.
        seconds: By stage, for all ranks together.
    """

    counts: set[StepCounts]
    term_tokens: set[int | float]
    num_microbatches: int
    facts: dict[str, int | float]
    values: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    gradient_sums: dict[str, float] = field(default_factory=dict)
    gradient_products: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    payload: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def _log_prob_columns(batch: dict[str, Any], cp_rank: int, cp_size: int) -> dict[str, list[torch.Tensor]]:
    """Log-probs of both policies on this rank, e^5 apart where the correction rejects."""
    tokens = [
        scaled_step.local_tokens(total, response, cp_rank, cp_size)
        for total, response in zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    ]
    return {
        "log_probs": [torch.zeros(len(t)) for t in tokens],
        "rollout_log_probs": [
            -5.0 * scaled_step.rejected(row, t) for row, t in zip(batch["sample_indices"], tokens, strict=True)
        ],
    }


def _values(batch: dict[str, Any], cp_rank: int, cp_size: int) -> torch.Tensor:
    """The values of a micro-batch's response tokens on this rank, as logits."""
    rows = zip(batch["sample_indices"], batch["total_lengths"], batch["response_lengths"], strict=True)
    pieces = [
        scaled_step.value4(row, scaled_step.local_tokens(total, response, cp_rank, cp_size)) / 4
        for row, total, response in rows
        if row is not None
    ]
    return torch.cat([*pieces, torch.zeros(0)]).reshape(1, -1, 1)


def _batches(setting: Setting) -> list[dict[str, Any]]:
    """Conversion, split and tensors: each data-parallel rank's batch."""
    args = setting.arguments("prompt_mean")
    samples = scaled_step.samples_of(setting.lengths, is_weighted=setting.is_weighted)
    data = convert_samples_to_train_data(args, samples, {}, None, None)
    shards = split_train_data_by_dp(args, data, setting.world.dp_size)
    return [move_to_device(process_rollout_data_shard(args, shard), "cpu") for shard in shards]


def _schedules(setting: Setting, batches: Sequence[dict[str, Any]]) -> dict[Rank, tuple[DataIterator, int]]:
    """Each rank's iterator, prepared, and its micro-batches."""
    world, args = setting.world, setting.arguments("prompt_mean", "policy_loss")

    def schedule(rank: Rank) -> tuple[DataIterator, int]:
        dp_rank, cp_rank = rank
        batch = dict(batches[dp_rank])
        iterators, num_microbatches = get_data_iterator(args, None, batch)
        if setting.is_rejecting:
            batch.update(_log_prob_columns(batch, cp_rank, world.cp_size))
        prepare_loss_terms(args, batch, iterators, num_microbatches)
        assert len(iterators) == len(num_microbatches) == 1
        return iterators[0], num_microbatches[0]

    return world.run(schedule)


def _describe(setting: Setting, schedules: dict[Rank, tuple[DataIterator, int]]) -> dict[str, int | float]:
    """What is said of the step, which is one thing on all ranks."""
    args = setting.arguments("prompt_mean", "policy_loss")

    def describe(rank: Rank) -> tuple[tuple[str, int | float], ...]:
        iterator, num_microbatches = schedules[rank]
        (facts,) = describe_steps(args, iterator.rollout_data, iterator, [num_microbatches])
        return tuple(facts.items())

    (facts,) = set(setting.world.run(describe).values())
    return dict(facts)


def _run_losses(setting: Setting, schedules: dict[Rank, tuple[DataIterator, int]], result: Result) -> dict:
    """Every micro-batch of every rank under every mode; return the ranks' log dictionaries by mode."""
    world = setting.world
    logs: dict[str, dict[Rank, list]] = {mode: {rank: [] for rank in schedules} for mode in scaled_step.MODES}
    args_of = {mode: setting.arguments(mode) for mode in scaled_step.MODES}
    for totals in (result.values, result.sizes, result.gradient_sums, result.gradient_products):
        totals.update(dict.fromkeys(scaled_step.MODES, 0.0))
    for rank, (iterator, num_microbatches) in schedules.items():
        world.enter(rank)
        for _ in range(num_microbatches):
            batch = iterator.get_next()
            values = _values(batch, rank[1], world.cp_size)
            for mode, args in args_of.items():
                logits = values.clone().requires_grad_()
                loss, _, log_dict = loss_function(args, batch, num_microbatches, logits)
                loss.backward()
                # FSDP2 averages over the data-parallel ranks.
                result.values[mode] += loss.item() / world.dp_size
                result.sizes[mode] += abs(loss.item()) / world.dp_size
                gradient = logits.grad.double() / world.dp_size
                result.gradient_sums[mode] += gradient.sum().item()
                result.gradient_products[mode] += (gradient * values).sum().item()
                logs[mode][rank].append(log_dict)
    return logs


def run_step(setting: Setting, note: Callable[[str], None] = lambda text: None) -> Result:
    """Run one step of all rows on all ranks."""
    start, seconds = perf_counter(), {}

    def lap(stage: str) -> None:
        nonlocal start
        now = perf_counter()
        seconds[stage], start = now - start, now
        note(f"{stage}: {seconds[stage]:.1f} s")

    batches = _batches(setting)
    lap("conversion, split, tensors")
    schedules = _schedules(setting, batches)
    payload = {f"schedule, {axis} {turn}": size for (axis, turn), size in setting.world.payload.items()}
    lap("schedule, counts, terms")
    totals = {num_microbatches for _, num_microbatches in schedules.values()}
    assert len(totals) == 1, "ranks agree on the number of micro-batches"
    iterators = [iterator for iterator, _ in schedules.values()]
    facts = _describe(setting, schedules)
    payload |= {f"facts, {axis} {turn}": size for (axis, turn), size in setting.world.payload.items()}
    lap("what samples weigh")
    result = Result(
        {iterator.step_counts[0] for iterator in iterators},
        {iterator.step_facts[0]["term_counts"].num_tokens for iterator in iterators},
        *totals,
        facts,
        payload=payload,
    )
    logs = _run_losses(setting, schedules, result)
    lap("losses, four modes")
    for mode, by_rank in logs.items():
        metrics = setting.world.run(lambda rank, by_rank=by_rank: aggregate_train_losses(by_rank[rank])["loss"])
        (result.metrics[mode],) = set(metrics.values())
        result.payload |= {f"metrics, {axis} {turn}": size for (axis, turn), size in setting.world.payload.items()}
    lap("metrics, four modes")
    result.seconds = seconds
    return result


def run_huge_counts(world: World, *, num_rows: int, length: int) -> tuple[set[StepCounts], set[float], dict[str, int]]:
    """Run a `token_mean` step of rows that all have the same length, no mask and values of 1.

    A row's mask is one number seen many times, so that a step of billions of tokens fits; each rank's counts are taken
    as of any other mask. Every rank has `num_rows` rows.

    Returns:
        N, P and M; the logged loss, which is M / M; and what a rank brings to each collective, in bytes.
    """
    args = mode_namespace("token_mean", loss_type="custom_loss", custom_loss_function_path=scaled_step.LINEAR_LOSS)
    masks = [torch.ones(1, dtype=torch.int64).expand(length)] * num_rows
    lengths = {"total_lengths": [length + 1] * num_rows, "response_lengths": [length] * num_rows}
    batch = {"loss_masks": masks, "step_row_counts": [num_rows], **lengths}
    counts = set(world.run(lambda rank: get_step_counts(batch)[0]).values())
    payload = {f"schedule, {axis} {turn}": size for (axis, turn), size in world.payload.items()}
    logs = {}
    for rank in world.ranks():
        world.enter(rank)
        logits = torch.ones(1, num_rows * length, 1)
        logs[rank] = loss_function(args, {**batch, "step_counts": next(iter(counts))}, 1, logits)[2]
    metrics = set(world.run(lambda rank: aggregate_train_losses([logs[rank]])["loss"]).values())
    return counts, metrics, payload | {f"metrics, {axis} {turn}": size for (axis, turn), size in world.payload.items()}
