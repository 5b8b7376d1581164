"""What the main term of a loss sums over, and the totals of the whole step that divide it.

The main term is the policy-gradient term, or the SFT or value loss. With k_it what is left of the mask m_it after an
off-policy correction, and w_it >= 0 the loss weights,

    value = (1 / Z) * sum_i (1 / d_i) * sum_t k_it * w_it * x_it

where d_i and Z are those of the mode, with c_it in place of m_it: what is counted of a token.

| `--rejected-tokens` | `--loss-weight-normalization` | c_it        |
|---------------------|-------------------------------|-------------|
| drop                | weights                       | k_it * w_it |
| keep                | weights                       | m_it * w_it |
| drop                | tokens                        | k_it        |
| keep                | tokens                        | m_it        |

Without a correction and without weights all of them are m_it. N and P count samples and groups whatever is left of
them. Shapes: B rows, T tokens of them on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from miles.backends.training_utils.cp_utils import as_row_tensor
from miles.backends.training_utils.loss_aggregation import (
    LossAggregation,
    Reducer,
    RowTotals,
    StepCounts,
    concat,
    mask_sums,
)
from miles.backends.training_utils.loss_hub.math_utils import row_sums, weighted_reducer
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.utils.options import Options

TERM_COLUMNS = ("row_totals", "rollout_totals", "rollout_token_totals", "prompt_totals")
"""Columns, one number for each row, that `prepare_loss_terms` adds."""


class MetricDict(dict[str, torch.Tensor]):
    """Scalar metrics of a micro-batch, each a local sum, with the step total that it has to be divided by.

    Attributes:
        units: By key, "tokens" for a sum over active tokens (divide by M), or "term" for one over the tokens that the
            main term counts, which are others where a correction or loss weights changed them. All other keys are
            sums over samples (divide by N).
    """

    def __init__(self, metrics: Mapping[str, torch.Tensor], units: Mapping[str, Literal["tokens", "term"]]) -> None:
        super().__init__(metrics)
        self.units = units


@dataclass(frozen=True)
class LossTerm:
    """The main term of a micro-batch.

    Attributes:
        responses: The micro-batch.
        weights: w, B whole-response rows of float32, or None for ones.
        row_totals: `[B]` sum of c over each row; int64, float64 where weights count.
        rollout_totals: `[B]` sum of c over each row's rollout: d_i of `sample_mean`.
        rollout_token_totals: `[B]` int64, the same without weights: d_i of sample means that are not weighted.
        prompt_totals: `[B]` sum of c over each row's prompt group, None where groups are not known.
        counts: N and P of the step, with the sum of c as `num_tokens`; None for a batch that does not know its step.
    """

    responses: Responses
    weights: Sequence[torch.Tensor] | None
    row_totals: torch.Tensor
    rollout_totals: torch.Tensor
    rollout_token_totals: torch.Tensor
    prompt_totals: torch.Tensor | None
    counts: StepCounts | None

    @classmethod
    def of(cls, responses: Responses, masks: Sequence[torch.Tensor] | None = None) -> LossTerm:
        """Read the term from a micro-batch.

        A batch without the columns of `prepare_loss_terms` takes what it has: the totals that conversion wrote and,
        where there are none, those of its own rows, over `masks` (by default "loss_masks") where tokens were rejected.

        Raises:
            ValueError: the batch has loss weights and was not prepared.
        """
        batch, weights = responses.batch, responses.batch.get("loss_weights")
        if "row_totals" in batch:
            totals, of_rollouts, tokens = (batch[key] for key in TERM_COLUMNS[:3])
            of_prompts, counts = batch.get("prompt_totals"), batch["term_counts"]
            return cls(responses, weights, totals, of_rollouts, tokens, of_prompts, counts)
        if weights is not None:
            raise ValueError("batch['loss_weights'] needs totals of the whole step; run prepare_loss_terms before it")
        loss_masks: Sequence[torch.Tensor] = batch.get("loss_masks", masks or ())
        totals = mask_sums(loss_masks if masks is None else counted_masks(responses.args, loss_masks, masks))
        of_rollouts = batch.get("rollout_mask_sums")
        of_rollouts = totals if of_rollouts is None else torch.as_tensor(of_rollouts, device=totals.device)
        of_prompts, counts = batch.get("prompt_mask_sums"), batch.get("step_counts")
        return cls(responses, None, totals, of_rollouts, of_rollouts, of_prompts, counts)

    def divisor_totals(self, *, like: Sequence[torch.Tensor]) -> RowTotals:
        """Return what the divisors of the mode are made of, on the device of the rows `like`.

        A micro-batch that does not know its step is taken as complete groups: P / N = 1 / n_samples_per_prompt.
        """
        args = self.responses.args
        counts = self.counts
        if counts is None:
            counts = StepCounts(num_samples=args.n_samples_per_prompt, num_prompts=1, num_tokens=0)
        return RowTotals(
            samples=as_row_tensor(self.rollout_totals, like=like),
            prompts=None if self.prompt_totals is None else as_row_tensor(self.prompt_totals, like=like),
            counts=counts,
            divisor=args.loss_aggregation_divisor,
            step_samples=self.responses.batch.get("sample_totals"),
        )

    def default_reducer(self) -> Reducer:
        """Build the reducer that a loss gets: under `token_mean` the token sum, else the sample mean over rollouts.

        Every active token of "loss_masks" is summed, times its loss weight where there are such.
        """
        responses, masks = self.responses, self.responses.batch["loss_masks"]
        if LossAggregation.of(responses.args).counts_tokens:
            return self.weigh(responses.token_sum(masks))
        divisors = responses.batch.get("rollout_mask_sums") if self.weights is None else self.rollout_totals
        return self.weigh(responses.sample_mean(masks, divisors))

    def weigh(self, reducer: Reducer) -> Reducer:
        """Return x -> reducer(w * x); the reducer itself where there are no weights."""
        if self.weights is None:
            return reducer
        return weighted_reducer(reducer, concat(self.responses.slice(self.weights)))


def counted_masks(
    args: Options, loss_masks: Sequence[torch.Tensor], kept_masks: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return the masks whose tokens are counted, k or m, as `--rejected-tokens` says."""
    return kept_masks if args.rejected_tokens == "drop" else loss_masks


def counted_sums(args: Options, masks: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None) -> torch.Tensor:
    """Return the sum of c over each row, `[B]`, from `counted_masks`: int64, or float64 where weights count."""
    if weights is None or args.loss_weight_normalization == "tokens":
        return mask_sums(masks)
    return row_sums(concat(masks).to(torch.float64) * concat(weights).to(torch.float64), masks)
