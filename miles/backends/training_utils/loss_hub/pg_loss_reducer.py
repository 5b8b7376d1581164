"""How the terms of the policy loss are reduced: the main one by the aggregation mode or a custom reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation, Reducer, takes_stacks
from miles.backends.training_utils.loss_hub.custom_reducer import ReducerContext, load_pg_loss_reducer
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.loss_term import LossTerm
from miles.utils.misc import wants_context
from miles.utils.options import Options
from miles.utils.types import RolloutBatch


def get_pg_loss_reducer(
    args: Options,
    batch: RolloutBatch,
    *,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    pg_loss_masks: Sequence[torch.Tensor],
    max_seq_lens: Sequence[int] | None,
    default_reducer: Reducer,
) -> Reducer:
    """Choose the reducer of the policy-gradient term.

    A custom reducer (`args.custom_pg_loss_reducer_function_path`) comes before every mode. Then `sample_mean` is
    `default_reducer` itself, and the other modes build theirs over `pg_loss_masks` with their own divisors.

    Args:
        args: Reads the mode, `loss_aggregation_divisor`, `qkv_format` and, for a micro-batch that does not know its
            step, `n_samples_per_prompt`.
        batch: Micro-batch; `prompt_mean` reads "prompt_mask_sums" (`[B]` M_g), or "prompt_totals" where what is
            counted differs from the original masks, and "step_counts".
        total_lengths: B lengths of prompt and response.
        response_lengths: B lengths of the response.
        pg_loss_masks: B whole-response masks of the tokens that the term sums over.
        max_seq_lens: B padded lengths, for "bshd".
        default_reducer: The sample-mean reducer.

    Returns:
        A reducer of `[T]` to a scalar, to be divided by the step's normalizer.

    Raises:
        ValueError: `prompt_mean` without `batch["prompt_mask_sums"]`, `constant` without a divisor, an unknown
            mode.
    """
    responses = Responses(Options.of(args), batch)
    if responses.args.custom_pg_loss_reducer_function_path is not None:
        context = ReducerContext.of(responses, pg_loss_masks) if wants_context(args) else None
        return load_pg_loss_reducer(args, total_lengths, response_lengths, pg_loss_masks, context=context)
    mode = LossAggregation.of(args)
    if mode is MODES["sample_mean"]:
        return default_reducer
    if mode.needs_step_samples and batch.get("sample_totals") is None:
        raise ValueError(f"{mode.name} needs totals of the whole step; run prepare_loss_terms before it")
    totals = LossTerm.of(responses, pg_loss_masks).divisor_totals(like=pg_loss_masks)
    denominators = mode.denominators(totals)
    of_rows, of_all = (denominators, None) if isinstance(denominators, torch.Tensor) else (None, denominators)
    return get_sum_of_sample_mean(
        total_lengths,
        response_lengths,
        pg_loss_masks,
        qkv_format=responses.args.qkv_format,
        max_seq_lens=max_seq_lens,
        sample_denoms=of_rows,
        constant_divisor=of_all,
    )


@dataclass(frozen=True)
class PolicyReducers:
    """Reducers of `[T]` per-token values to this micro-batch's share of a sum over the step.

    Attributes:
        pg: The policy-gradient term: the mode's, or a custom reducer, over what the correction left, weighted.
        auxiliary: Entropy and KL: `pg` with `aux_loss_aggregation` "match", else `kept`.
        kept: The sample mean over what the correction left, divided by what `rejected_tokens` counts; unweighted.
        whole: The sample mean over the original masks.
        whole_like_mode: Under `token_mean` the token sum over the original masks, else `whole`.
    """

    pg: Reducer
    auxiliary: Reducer
    kept: Reducer
    whole: Reducer
    whole_like_mode: Reducer

    @classmethod
    def of(cls, responses: Responses, masks: Sequence[torch.Tensor], given: Reducer) -> PolicyReducers:
        """Build the reducers of a micro-batch.

        Args:
            responses: The micro-batch.
            masks: B whole-response masks that the correction left.
            given: The dispatcher's reducer, used where it is the one that is needed.
        """
        args, batch = responses.args, responses.batch
        loss_masks = batch["loss_masks"]
        term = LossTerm.of(responses, masks)
        per_token = LossAggregation.of(args).counts_tokens
        is_sample_mean = not per_token and term.weights is None
        whole = given if is_sample_mean else responses.sample_mean(loss_masks, batch.get("rollout_mask_sums"))
        kept = whole if masks is loss_masks else responses.sample_mean(masks, term.rollout_token_totals)
        default = kept if term.weights is None else responses.sample_mean(masks, term.rollout_totals)
        reducer = get_pg_loss_reducer(
            args,
            batch,
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            pg_loss_masks=masks,
            max_seq_lens=batch.get("max_seq_lens"),
            default_reducer=default,
        )
        pg = term.weigh(reducer)
        return cls(
            pg=pg,
            auxiliary=pg if args.aux_loss_aggregation == "match" else kept,
            kept=kept,
            whole=whole,
            whole_like_mode=responses.token_sum(loss_masks) if per_token else whole,
        )


def reduce_together(columns: Mapping[str, tuple[Reducer, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Reduce metrics, those that share a reducer in one operation.

    Args:
        columns: By name, the reducer and its values `[T]`, without gradient.

    Returns:
        Scalars by name, in the order of `columns`.
    """
    names_of: dict[Reducer, list[str]] = {}
    for name, (reducer, _) in columns.items():
        names_of.setdefault(reducer, []).append(name)
    results: dict[str, torch.Tensor] = {}
    for reducer, names in names_of.items():
        values = [columns[name][1] for name in names]
        if len(names) > 1 and takes_stacks(reducer):
            results |= zip(names, reducer(torch.stack(values)).unbind(), strict=True)
        else:
            results |= {name: reducer(value) for name, value in zip(names, values, strict=True)}
    return {name: results[name] for name in columns}
