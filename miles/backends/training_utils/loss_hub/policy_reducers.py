"""The four reductions of the policy loss: its main term, its auxiliary terms, and two kinds of metrics."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.loss_aggregation import LossAggregation, Reducer
from miles.backends.training_utils.loss_hub.pg_loss_reducer import get_pg_loss_reducer
from miles.backends.training_utils.loss_term import LossTerm
from miles.utils.types import RolloutBatch


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


def build_policy_reducers(
    args: Namespace, batch: RolloutBatch, masks: Sequence[torch.Tensor], given: Reducer
) -> PolicyReducers:
    """Build the reducers of a micro-batch.

    Args:
        args: Reads the mode, `aux_loss_aggregation`, `qkv_format` and what `get_pg_loss_reducer` reads.
        batch: The micro-batch.
        masks: B whole-response masks that the correction left.
        given: The dispatcher's reducer, used where it is the one that is needed.
    """
    term = LossTerm.of(args, batch, masks)
    per_token = LossAggregation.of(args).counts_tokens
    is_sample_mean = not per_token and term.weights is None
    whole = given if is_sample_mean else sample_mean(args, batch, batch["loss_masks"], batch.get("rollout_mask_sums"))
    kept = whole
    if masks is not batch["loss_masks"]:
        kept = sample_mean(args, batch, masks, term.rollout_token_totals)
    default = kept if term.weights is None else sample_mean(args, batch, masks, term.rollout_totals)
    pg = get_pg_loss_reducer(
        args,
        batch,
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        pg_loss_masks=masks,
        max_seq_lens=batch.get("max_seq_lens"),
        default_reducer=default,
    )
    pg = term.weigh(args, batch, pg)
    return PolicyReducers(
        pg=pg,
        auxiliary=pg if auxiliary_terms_match(args) else kept,
        kept=kept,
        whole=whole,
        whole_like_mode=token_sum(args, batch, batch["loss_masks"]) if per_token else whole,
    )


def auxiliary_terms_match(args: Namespace) -> bool:
    """Whether entropy and KL are reduced like the policy-gradient term."""
    return getattr(args, "aux_loss_aggregation", "sample_mean") == "match"


def sample_mean(
    args: Namespace,
    batch: RolloutBatch,
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: torch.Tensor | Sequence[torch.Tensor] | None,
) -> Reducer:
    """Build the sample-mean reducer over masks of one's own; without divisors each row is divided by its tokens."""
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        qkv_format=args.qkv_format,
        max_seq_lens=batch.get("max_seq_lens"),
        sample_denoms=sample_denoms,
    )


def token_sum(args: Namespace, batch: RolloutBatch, loss_masks: Sequence[torch.Tensor]) -> Reducer:
    """Build the reducer that adds up tokens."""
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        True,
        args.qkv_format,
        batch.get("max_seq_lens"),
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
        if len(names) > 1 and getattr(reducer, "takes_stacks", False):
            results |= zip(names, reducer(torch.stack(values)).unbind(), strict=True)
        else:
            results |= {name: reducer(value) for name, value in zip(names, values, strict=True)}
    return {name: results[name] for name in columns}
