"""What divides the main term of each optimizer step, known before the step's first micro-batch.

Masks that change at train time (rejection) and loss weights change what is counted, so the totals that conversion and
`get_step_counts` took of the original masks no longer divide the term. `prepare_loss_terms` runs the correction once
over the rank's rows of each step, and adds up what is counted over all ranks: by step, by rollout and by prompt group.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from miles.backends.training_utils.data import DataIterator
from miles.backends.training_utils.loss_aggregation import LossAggregation, StepCounts, concat, mask_sums
from miles.backends.training_utils.loss_hub.corrections import may_reject, run_correction
from miles.backends.training_utils.loss_hub.custom_correction import refuse_other_losses, refuse_other_masks
from miles.backends.training_utils.loss_hub.math_utils import split_like, sum_by
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.loss_term import counted_masks, counted_sums
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.distributed_utils import on_every_rank
from miles.utils.misc import wants_context
from miles.utils.options import Options
from miles.utils.types import RolloutBatch

logger = logging.getLogger(__name__)


def prepare_loss_terms(
    args: Options, rollout_data: RolloutBatch, iterators: Sequence[DataIterator], num_microbatches: Sequence[int]
) -> None:
    """Add to the rank's rows what `LossTerm` reads, in place; every rank calls this.

    Nothing is done where the original masks are what is counted: no correction that may reject, no loss weights, no
    reducer that asks for its context. Otherwise one collective over the data-parallel ranks for all steps.

    Args:
        args: The run's arguments.
        rollout_data: The rank's rows with "log_probs" (a pipeline stage without logits has none), and
            "rollout_indices" and, where groups are known, "prompt_indices".
        iterators: The rows' schedules; their `step_facts` get the counts of the term.
        num_microbatches: Micro-batches of each step.

    Raises:
        UserError: a custom correction broke its contract, or its masks depend on the micro-batch; on every rank.
    """
    args = Options.of(args)
    weights = rollout_data.get("loss_weights")
    if not (may_reject(args) or weights is not None or wants_step_samples(args)):
        return
    masks = rollout_data["loss_masks"]
    if may_reject(args):
        masks = rollout_data["kept_masks"] = _kept_masks(args, rollout_data, iterators[0])
    counts = _counts_by_step(iterators[0], num_microbatches)
    counted = counted_masks(args, rollout_data["loss_masks"], masks)
    rollout_data["row_totals"] = counted_sums(args, counted, weights)
    kept = masks if weights is None else [mask * (weight > 0) for mask, weight in zip(masks, weights, strict=True)]
    facts = _add_totals(rollout_data, mask_sums(counted), mask_sums(kept), counts)
    for iterator in iterators:
        iterator.step_facts = [fact for fact, total in zip(facts, num_microbatches, strict=True) for _ in range(total)]


def wants_step_samples(args: Options) -> bool:
    """Whether the run's reducer reads the totals of all samples of the step: a custom one's context, or a mode's."""
    return wants_context(args) or LossAggregation.of(args).needs_step_samples


def is_left_empty(args: Options, tokens: Mapping[str, int | float]) -> bool:
    """Whether a step has nothing to take a mean of: `token_mean`, and no token is left that counts.

    Args:
        args: Reads the mode.
        tokens: `DataIterator.peek_tokens` of the step.
    """
    counted = tokens.get("num_counted_tokens", tokens["num_tokens"])
    return LossAggregation.of(args).counts_tokens and not counted > 0


def warn_of_empty_step(args: Options, rollout_id: int, step_id: int, tokens: Mapping[str, int | float]) -> None:
    """Say so where nothing is left of a step, and what becomes of it; `tokens` as in `is_left_empty`."""
    if tokens.get("num_kept_tokens") == 0 < tokens["num_tokens"]:
        is_skipped = is_left_empty(args, tokens)
        logger.warning(
            "rollout %d, step %d: an off-policy correction or loss weights left no token, so %s; compare the "
            "rollout's log-probs with the trainer's (--get-mismatch-metrics), look at the weights, or widen "
            "--tis-clip-low and --tis-clip",
            rollout_id,
            step_id,
            "there is no token mean and the step is skipped" if is_skipped else "the loss's main term is zero",
        )


def _starts(num_microbatches: Sequence[int]) -> list[int]:
    return [sum(num_microbatches[:step]) for step in range(len(num_microbatches))]


def _counts_by_step(iterator: DataIterator, num_microbatches: Sequence[int]) -> list[StepCounts]:
    return [iterator.step_counts[start] for start in _starts(num_microbatches)]


def _kept_masks(args: Options, rollout_data: RolloutBatch, iterator: DataIterator) -> list[torch.Tensor]:
    """Return what the correction leaves of all of the rank's rows; a stage without log-probs keeps the masks."""
    if not get_parallel_state().is_pp_last_stage:
        return on_every_rank(lambda: rollout_data["loss_masks"])
    # A custom correction may fail on one rank alone; a built-in one sums over context-parallel ranks, that fail alike.
    local = on_every_rank(lambda: _local_kept_masks(args, rollout_data, iterator))
    return Responses(args, rollout_data).gather(local)


def _local_kept_masks(args: Options, rollout_data: RolloutBatch, iterator: DataIterator) -> list[torch.Tensor]:
    """Run the correction on each step's rows, and a custom one on parts of them to compare."""
    path = args.custom_tis_function_path
    local: list[torch.Tensor] = []
    for num_rows in rollout_data["step_row_counts"]:
        step = range(len(local), len(local) + num_rows)
        if not num_rows:
            continue
        _, whole_loss, masks = _run_on(args, rollout_data, step, fill=1.0)
        local += masks
        losses = dict(zip(step, split_like(whole_loss, masks), strict=True))
        # Halves differ from the step even where each rank has one micro-batch of it.
        for half in (step[::2], step[1::2]) if path is not None and num_rows > 1 else ():
            responses, loss, masks = _run_on(args, rollout_data, half, fill=1.0)
            refuse_other_masks(str(path), responses, masks, [local[row] for row in half])
            refuse_other_losses(str(path), responses, loss, concat([losses[row] for row in half]))
    for rows in iterator.micro_batch_indices if path is not None else ():
        if rows:
            responses, _, masks = _run_on(args, rollout_data, rows, fill=0.0)
            refuse_other_masks(str(path), responses, masks, [local[row] for row in rows])
    return local


def _run_on(
    args: Options, rollout_data: RolloutBatch, rows: Sequence[int], *, fill: float
) -> tuple[Responses, torch.Tensor, Sequence[torch.Tensor]]:
    """Run the correction on some rows, with a constant as the loss that is not known yet."""
    batch = DataIterator(rollout_data, [list(rows)], [StepCounts(0, 0, 0)]).get_next()
    responses = Responses(args, batch)
    pg_loss = torch.full(responses.active.shape, fill, device=responses.active.device)
    loss, masks, _ = run_correction(responses, pg_loss)
    return responses, loss, masks


def _add_totals(
    rollout_data: RolloutBatch, token_sums: torch.Tensor, kept_sums: torch.Tensor, counts: Sequence[StepCounts]
) -> list[dict[str, Any]]:
    """Add the columns of totals over all ranks; return each step's facts.

    Args:
        rollout_data: The rank's rows with "row_totals".
        token_sums: `[B]` counted tokens of each row, without weights.
        kept_sums: `[B]` tokens of each row that are summed.
        counts: N, P and M of each step.
    """
    row_totals = rollout_data["row_totals"]
    num_rollouts = sum(count.num_samples for count in counts)
    by_rollout = rollout_data["rollout_indices"].to(row_totals.device)
    by_prompt = rollout_data.get("prompt_indices")
    step_of_row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(rollout_data["step_row_counts"])).to(
        row_totals.device
    )
    parts = [
        sum_by(row_totals, step_of_row, len(counts)),
        sum_by(kept_sums.to(row_totals), step_of_row, len(counts)),
        sum_by(row_totals, by_rollout, num_rollouts),
        sum_by(token_sums.to(row_totals), by_rollout, num_rollouts),
        sum_by(first_rows(rollout_data).to(row_totals) * step_of_row, by_rollout, num_rollouts),
    ]
    if by_prompt is not None:
        by_prompt = by_prompt.to(row_totals.device)
        parts.append(sum_by(row_totals, by_prompt, sum(count.num_prompts for count in counts)))
    # One vector: int64, or float64, which holds counts up to 2^53 exactly, where weights count.
    total = get_parallel_state().intra_dp.all_reduce(torch.cat(parts)).to(row_totals.device)
    steps, kept_steps, rollouts, tokens, step_of_rollout, *prompts = total.split([len(part) for part in parts])
    rollout_data["rollout_totals"] = rollouts[by_rollout]
    rollout_data["rollout_token_totals"] = tokens[by_rollout].to(torch.int64)
    if prompts:
        rollout_data["prompt_totals"] = prompts[0][by_prompt]
    return [
        {
            "term_counts": replace(count, num_tokens=counted),
            "num_kept_tokens": int(kept),
            "sample_totals": rollouts[step_of_rollout == step],
        }
        for step, (count, counted, kept) in enumerate(zip(counts, steps.tolist(), kept_steps.tolist(), strict=True))
    ]


def first_rows(rollout_data: RolloutBatch) -> torch.Tensor:
    """Return 1 for the first row of each rollout, and 0 for the others."""
    counts = rollout_data.get("rollout_counts")
    return torch.ones(len(rollout_data["loss_masks"]), dtype=torch.int64) if counts is None else counts
