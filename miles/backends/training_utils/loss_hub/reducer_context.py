"""What a custom reducer may ask for: the step's counts, the divisors of every mode, and this rank's share of rows."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation, StepCounts
from miles.backends.training_utils.loss_hub.responses import slice_rows
from miles.backends.training_utils.loss_term import LossTerm
from miles.utils.types import RolloutBatch


@dataclass(frozen=True)
class ReducerContext:
    """Handed as the keyword `context` to a reducer factory that declares it.

    A reducer returns this micro-batch's and this rank's share of a sum over the step; the trainer divides the sum by
    `normalizer`. A factor that depends on rows alone, on the fields below among them, keeps it exact under every cut.

    Attributes:
        args: The run's arguments.
        step_counts: N samples, P prompt groups and what is counted of all tokens, over the whole step.
        normalizer: Z of the run's mode: the counted tokens under `token_mean`, else N.
        denominators: d_i of every mode by its name, `[B]` float64; None for `prompt_mean` where the rows' groups are
            not known, and for `constant` without `--loss-aggregation-divisor`.
        sample_totals: `[N]` counted tokens of each sample of the whole step, in no particular order; 0 where nothing
            is left of it. int64, float64 where loss weights count.
        local_lengths: B numbers T_i of response tokens on this context-parallel rank; the values that the reducer gets
            have their sum as length.
        local_masks: B masks `[T_i]` of the tokens that the policy term sums over.
        max_seq_lens: B padded lengths, for "bshd".
        qkv_format: "thd" or "bshd".
    """

    args: Namespace
    step_counts: StepCounts
    normalizer: int | float
    denominators: Mapping[str, torch.Tensor | None]
    sample_totals: torch.Tensor
    local_lengths: Sequence[int]
    local_masks: Sequence[torch.Tensor]
    max_seq_lens: Sequence[int] | None
    qkv_format: str

    @classmethod
    def of(cls, args: Namespace, batch: RolloutBatch, masks: Sequence[torch.Tensor]) -> ReducerContext:
        """Read the context from a micro-batch that `prepare_loss_terms` has prepared.

        Raises:
            ValueError: the batch does not know its step.
        """
        if batch.get("sample_totals") is None:
            raise ValueError("a reducer's context needs totals of the whole step; run prepare_loss_terms before it")
        term = LossTerm.of(args, batch)
        local_masks = slice_rows(args, batch, masks)
        return cls(
            args=args,
            step_counts=term.counts,
            normalizer=LossAggregation.of(args).normalizer(term.counts),
            denominators=_denominators(args, batch, term),
            sample_totals=batch["sample_totals"],
            local_lengths=[mask.numel() for mask in local_masks],
            local_masks=local_masks,
            max_seq_lens=batch.get("max_seq_lens"),
            qkv_format=args.qkv_format,
        )


def _denominators(args: Namespace, batch: RolloutBatch, term: LossTerm) -> dict[str, torch.Tensor | None]:
    """Return d_i `[B]` of every mode, None where the step does not have what the mode needs."""
    totals = term.divisor_totals(args, batch, like=[term.row_totals])
    is_lacking = {
        "needs_prompt_groups": totals.prompts is None or not totals.counts.num_prompts,
        "needs_divisor": totals.divisor is None,
    }
    denominators: dict[str, torch.Tensor | None] = {}
    for name, mode in MODES.items():
        if any(getattr(mode, need) and lacking for need, lacking in is_lacking.items()):
            denominators[name] = None
        else:
            divisors = torch.as_tensor(mode.denominators(totals), dtype=torch.float64, device=totals.samples.device)
            denominators[name] = divisors.expand(totals.samples.shape)
    return denominators
