"""What an aggregation makes of the rows of an optimizer step: the weight of each token in the step's value.

    value = sum_i sum_t w_it * x_it,    w_i = sum_t w_it

The weights are the gradient of the very reducer that training uses, so what is logged of a step is what the step does.
Shapes: B rows on this rank, T response tokens of them on this context-parallel rank, N samples (rollouts) in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from miles.backends.training_utils.data import DataIterator
from miles.backends.training_utils.loss_aggregation import LossAggregation, StepCounts, mask_sums
from miles.backends.training_utils.loss_hub.math_utils import row_sums, sum_by
from miles.backends.training_utils.loss_hub.pg_loss_reducer import PolicyReducers
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.loss_term import LossTerm
from miles.backends.training_utils.parallel import get_parallel_state
from miles.backends.training_utils.step_totals import first_rows, is_left_empty
from miles.ray.rollout.steps import LONGEST_QUARTER
from miles.utils.options import Options
from miles.utils.types import RolloutBatch


def token_weights(args: Options, batch: RolloutBatch, masks: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """Return the weight of each token in the value of its step, w_it = d value / d x_it.

    That is m_it / (d_i Z), times the token's loss weight, or what a custom reducer makes of it.

    Args:
        args: Reads the mode, `loss_type`, `custom_pg_loss_reducer_function_path` and what the reducers read.
        batch: Rows of one step as a micro-batch: "loss_masks", "total_lengths", "response_lengths", "step_counts", and
            what the mode and `prepare_loss_terms` have added.
        masks: B whole-response masks of the tokens that a correction left; by default "kept_masks" where
            `prepare_loss_terms` has put them, else "loss_masks".

    Returns:
        `[T]` float64, 0 at tokens that are not summed, and everywhere in a step that is skipped, since nothing is left
        to divide by. Rows of other micro-batches and ranks have theirs: over all of them it is the step's gradient.
    """
    responses = Responses(Options.of(args), batch)
    if masks is None:
        masks = batch["kept_masks" if "kept_masks" in batch else "loss_masks"]
    counts: StepCounts = batch["term_counts"] if "term_counts" in batch else batch["step_counts"]
    # A custom reducer may not take another dtype than that of a loss.
    is_custom = responses.args.custom_pg_loss_reducer_function_path is not None
    dtype = torch.float32 if is_custom else torch.float64
    values = torch.zeros_like(responses.active, dtype=dtype, requires_grad=True)
    if is_left_empty(args, {"num_tokens": counts.num_tokens}):
        return values.detach().to(torch.float64)
    reducer = LossTerm.of(responses, masks).default_reducer()
    if responses.args.loss_type == "policy_loss":
        reducer = PolicyReducers.of(responses, masks, reducer).pg
    (gradient,) = torch.autograd.grad(reducer(values), values)
    return gradient.to(torch.float64) / LossAggregation.of(args).normalizer(counts)


def row_weights(args: Options, batch: RolloutBatch, weights: torch.Tensor) -> torch.Tensor:
    """Return w_i, the sum of each row's token weights; a collective over the context-parallel ranks.

    Args:
        args: Reads `qkv_format`.
        batch: The rows of `token_weights`.
        weights: `[T]` token weights.

    Returns:
        `[B]` float64, the same on every context-parallel rank.
    """
    return get_parallel_state().cp.all_reduce(_local_row_weights(args, batch, weights))


def _local_row_weights(args: Options, batch: RolloutBatch, weights: torch.Tensor) -> torch.Tensor:
    return row_sums(weights, Responses(Options.of(args), batch).masks)


def effective_number(weights: torch.Tensor) -> float:
    """Return how many equal weights are worth these, (sum w)^2 / sum w^2; 0.0 where there is no weight at all.

    Args:
        weights: Of any number of samples, or of prompts.

    Reference:
        Kish, Survey Sampling (1965): the effective sample size.
    """
    weights = weights.to(torch.float64)
    largest = max(weights.abs().tolist(), default=0.0)
    # Any unit of weight will do; in this one no square is lost below float64's range or beyond it.
    units = weights / (largest or 1.0)
    return _effective_number(units.sum().item(), units.square().sum().item())


def _effective_number(total: float, squares: float) -> float:
    return total * total / squares if squares else 0.0


def describe_steps(
    args: Options, rollout_data: RolloutBatch, iterator: DataIterator, num_microbatches: Sequence[int]
) -> list[dict[str, int | float]]:
    """Return what is logged of the data of each optimizer step; every rank calls this, after `prepare_loss_terms`.

    One float64 collective over the data-parallel ranks for all steps. One more, over the context-parallel ranks, of
    each row's weight; and one over the data-parallel ranks of each sample's, where a rollout has several rows.

    Args:
        args: What `token_weights` reads.
        rollout_data: The rank's rows; reads the columns of `add_step_columns` where they are there.
        iterator: Their schedule, with the steps' counts and facts.
        num_microbatches: Micro-batches of each step.

    Returns:
        For each step `DataIterator.peek_tokens` and "num_samples" N; "num_prompts" P where groups are known;
        "num_masked_samples", those without an active token; "effective_samples", `effective_number` of the w_i of
        samples; and, where lengths are known, "longest_quarter_weight", the share of sum_i w_i on the longest quarter,
        0 where no sample has weight.
    """
    steps = list(_whole_steps(rollout_data, iterator, num_microbatches))
    known = [step.peek_tokens() | {"num_samples": step.step_counts[0].num_samples} for step in steps]
    rows = _row_weights_of_steps(args, rollout_data, steps)
    samples = _sample_weights(rollout_data, rows, sum(step.step_counts[0].num_samples for step in steps))
    sums = _sums_by_step(rollout_data, samples)
    for facts, (total, squares, longest, masked, prompts) in zip(known, sums, strict=True):
        if "step_prompt_counts" in rollout_data:
            facts["num_prompts"] = int(prompts)
        facts["num_masked_samples"] = int(masked)
        facts["effective_samples"] = _effective_number(total, squares)
        if "length_quarters" in rollout_data:
            facts["longest_quarter_weight"] = longest / total if total else 0.0
    return known


def _whole_steps(
    rollout_data: RolloutBatch, iterator: DataIterator, num_microbatches: Sequence[int]
) -> Iterator[DataIterator]:
    """Yield the rank's rows of each step as the one micro-batch of an iterator."""
    row = micro_batch = 0
    for num_rows, total in zip(rollout_data["step_row_counts"], num_microbatches, strict=True):
        step = DataIterator(rollout_data, [list(range(row, row + num_rows))], [iterator.step_counts[micro_batch]])
        step.step_facts = [iterator.step_facts[micro_batch]]
        yield step
        row, micro_batch = row + num_rows, micro_batch + total


def _row_weights_of_steps(args: Options, rollout_data: RolloutBatch, steps: Sequence[DataIterator]) -> torch.Tensor:
    """Return the weight of each of the rank's rows in its step, `[B]` float64 on the CPU."""
    parts = []
    for step, num_rows in zip(steps, rollout_data["step_row_counts"], strict=True):
        batch = step.get_next()
        # Where there is no row, the batch has a blank one.
        parts.append(_local_row_weights(args, batch, token_weights(args, batch))[:num_rows])
    return get_parallel_state().cp.all_reduce(torch.cat(parts)).cpu()


def _sample_weights(rollout_data: RolloutBatch, rows: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Return `[B]` the weight of each sample on its first row, 0 on its other rows."""
    if "rollout_counts" not in rollout_data:
        return rows
    by_rollout = rollout_data["rollout_indices"].cpu()
    totals = get_parallel_state().intra_dp.all_reduce(sum_by(rows, by_rollout, num_samples)).cpu()
    return totals[by_rollout] * first_rows(rollout_data).cpu()


def _sums_by_step(rollout_data: RolloutBatch, samples: torch.Tensor) -> list[list[float]]:
    """Return of each step, over all ranks: sum w, sum w^2, sum w of the longest quarter, masked samples, prompts."""
    nothing = [0] * len(samples)
    is_longest = torch.tensor(rollout_data.get("length_quarters", nothing)) == LONGEST_QUARTER
    num_active = rollout_data.get("rollout_mask_sums")
    num_active = mask_sums(rollout_data["loss_masks"]) if num_active is None else num_active
    is_masked = (num_active == 0).cpu() * first_rows(rollout_data).cpu()
    prompts = torch.tensor(rollout_data.get("step_prompt_counts", nothing))
    # The squares are of plain weights: their largest over all ranks would take a collective more. They are lost
    # where no weight exceeds 1e-162, which no loss in float32 can tell from 0.
    columns = [samples, samples.square(), samples * is_longest, is_masked, prompts]
    facts = torch.stack([column.to(torch.float64) for column in columns], dim=1)
    local = torch.stack([part.sum(0) for part in facts.split(list(rollout_data["step_row_counts"]))])
    return get_parallel_state().intra_dp.all_reduce(local).tolist()
