"""What each sample of some rollouts weighs in its optimizer step, under every mode, by the functions of training.

Shapes: N samples (rollouts) of all steps of all dumps, P prompt groups; in one step B rows with T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.data import get_data_iterator, move_to_device
from miles.backends.training_utils.loss import compute_advantages_and_returns
from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation, concat, mask_sums, row_lengths
from miles.backends.training_utils.loss_hub.math_utils import sum_by
from miles.backends.training_utils.step_totals import prepare_loss_terms
from miles.backends.training_utils.step_weights import row_weights, token_weights
from miles.tools.aggregation_report.dumps import Dump
from miles.tools.aggregation_report.options import args_of_mode, with_values
from miles.utils.options import Options
from miles.utils.types import RolloutBatch

ROWS_AT_ONCE = 512
"""Rows of a micro-batch. Any split of a step has the same weights; this one fits the processor's cache."""


@dataclass(frozen=True)
class SampleWeights:
    """All samples of all steps of all dumps, and what they weigh.

    Attributes:
        lengths: [N] int64 response tokens.
        num_active: [N] int64 active (loss mask 1) response tokens.
        quarters: [N] int64 quarter by length among the samples of its step, 0 (shortest) to 3.
        steps: [N] int64 optimizer step, counted over all dumps.
        dumps: [N] int64 dump.
        prompts: [N] int64 prompt group, counted over all dumps; None where a sample has no group_index.
        group_indices: The group_index of each of P prompt groups in its dump; empty where `prompts` is None.
        rewards: [N] float64 raw.
        centred_rewards: [N] float64, as conversion makes advantages of them; None as `advantages`.
        advantages: [N] float64, as training computes them, NaN for a sample without response tokens; None where it is
            not known which samples answer the same prompt.
        weights: By mode, [N] float64 sum of the sample's token weights; modes that cannot be computed are absent.
        token_weights: By mode, [N] float64 weight of one active token, the mean over the sample's where loss weights
            differ; NaN where fully masked.
        refusals: Why a mode cannot be computed.
    """

    lengths: Tensor
    num_active: Tensor
    quarters: Tensor
    steps: Tensor
    dumps: Tensor
    prompts: Tensor | None
    group_indices: list[int]
    rewards: Tensor
    centred_rewards: Tensor | None
    advantages: Tensor | None
    weights: dict[LossAggregation, Tensor]
    token_weights: dict[LossAggregation, Tensor]
    refusals: dict[LossAggregation, str]


def longest_response(dumps: Sequence[Dump]) -> int:
    """Return the response tokens of the longest sample."""
    return max(int(_lengths(dump.shard).max()) for dump in dumps)


def sample_weights(args: Options, dumps: Sequence[Dump], *, divisor: float) -> SampleWeights:
    """Return what every sample weighs.

    Args:
        args: From `options.training_args`.
        dumps: Each with at least one sample.
        divisor: L of `constant`, in tokens.
    """
    refusals = {mode: f"{dump.path}: {reason}" for dump in reversed(dumps) for mode, reason in dump.refusals.items()}
    modes = {mode: args_of_mode(args, mode.name, divisor=divisor) for mode in MODES.values() if mode not in refusals}
    parts = [_of_dump(modes, dump) for dump in dumps]
    columns: dict[Any, Tensor] = {
        key: torch.cat([part[key] for part in parts]) for key in parts[0] if all(key in part for part in parts)
    }
    weights = {mode: columns[mode] for mode in modes}
    has_prompts, active = "prompts" in columns, columns["num_active"]
    return SampleWeights(
        lengths=columns["lengths"],
        num_active=active,
        quarters=columns["quarters"],
        rewards=columns["rewards"],
        centred_rewards=columns.get("centred_rewards"),
        advantages=columns.get("advantages"),
        steps=_counted_on(parts, "steps"),
        dumps=torch.repeat_interleave(torch.tensor([len(part["lengths"]) for part in parts])),
        prompts=_counted_on(parts, "prompts") if has_prompts else None,
        group_indices=[index for dump in dumps for index in _group_indices(dump.shard)] if has_prompts else [],
        weights=weights,
        # 0 / 0 is NaN, as it should be.
        token_weights={mode: weight / active for mode, weight in weights.items()},
        refusals=refusals,
    )


def _counted_on(parts: Sequence[dict[Any, Tensor]], key: str) -> Tensor:
    """Concatenate numbers that begin at 0 in each part, so that each part goes on where the last one stopped."""
    sizes = torch.tensor([0, *(int(part[key].max()) + 1 for part in parts)]).cumsum(0)
    return torch.cat([part[key] + size for part, size in zip(parts, sizes, strict=False)])


def _of_dump(modes: dict[LossAggregation, Options], dump: Dump) -> dict[Any, Tensor]:
    """Return the columns of one dump's samples, in the order of its file, and under each mode its weights."""
    args = with_values(modes[MODES["sample_mean"]], micro_batch_size=ROWS_AT_ONCE)
    data = move_to_device(dump.shard, "cpu")
    iterators, num_microbatches = get_data_iterator(args, None, data)
    columns = _plain_columns(dump.shard, data)
    if dump.knows_groups:
        compute_advantages_and_returns(args, data)
        columns["advantages"] = _of_first_token(data["advantages"])
        columns["centred_rewards"] = torch.tensor(dump.shard["rewards"], dtype=torch.float64)
    by_rollout = data["rollout_indices"]
    samples = {key: _of_samples(by_rollout, column) for key, column in columns.items()}
    samples["lengths"] = _lengths(dump.shard)
    samples["num_active"] = _sums(by_rollout, mask_sums(data["loss_masks"]))
    asking = next((own for mode, own in modes.items() if mode.needs_step_samples), args)
    prepare_loss_terms(asking, data, iterators, num_microbatches)
    rows: dict[LossAggregation, list[Tensor]] = {mode: [] for mode in modes}
    for _ in range(sum(num_microbatches)):
        batch = iterators[0].get_next()
        for mode, mode_args in modes.items():
            rows[mode].append(row_weights(mode_args, batch, token_weights(mode_args, batch)))
    return samples | {mode: _sums(by_rollout, torch.cat(parts)) for mode, parts in rows.items()}


def _plain_columns(shard: dict[str, Any], data: RolloutBatch) -> dict[Any, Tensor]:
    """Return the columns of rows, in the order of the shard, that need no arithmetic."""
    row_counts = torch.tensor(shard["step_row_counts"])
    columns = {
        "quarters": torch.tensor(shard["length_quarters"]),
        "steps": torch.repeat_interleave(torch.arange(len(row_counts)), row_counts),
        "rewards": torch.tensor(shard["raw_reward"], dtype=torch.float64),
    }
    if "prompt_indices" in data:
        columns["prompts"] = data["prompt_indices"]
    return columns


def _of_first_token(rows: Sequence[Tensor]) -> Tensor:
    """Return the first value of each row, NaN where it is empty: `[B]` float64."""
    lengths, values = row_lengths(rows), concat(rows).double()
    firsts = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    firsts[lengths > 0] = values[(lengths.cumsum(0) - lengths)[lengths > 0]]
    return firsts


def _of_samples(by_rollout: Tensor, rows: Tensor) -> Tensor:
    """Return `[N]` what the rows of each sample share, from `[B]`; NaN is a row that cannot tell."""
    samples = rows.new_zeros(int(by_rollout.max()) + 1)
    can_tell = ~rows.isnan()
    samples[by_rollout] = rows
    samples[by_rollout[can_tell]] = rows[can_tell]
    return samples


def _sums(by_rollout: Tensor, rows: Tensor) -> Tensor:
    """Return `[N]` the sum over the rows of each sample, from `[B]`."""
    return sum_by(rows, by_rollout, int(by_rollout.max()) + 1)


def _lengths(shard: dict[str, Any]) -> Tensor:
    return _sums(torch.tensor(shard["rollout_indices"]), torch.tensor(shard["response_lengths"]))


def _group_indices(shard: dict[str, Any]) -> list[int]:
    """Return the group_index of each prompt group, in the order of `prompt_indices`."""
    index_of = dict(zip(shard.get("prompt_indices", ()), shard.get("prompt_group_indices", ()), strict=True))
    return [index_of[index] for index in sorted(index_of)]
