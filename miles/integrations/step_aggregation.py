"""The aggregation of one optimizer step in any training loop.

    value = (1 / Z) * sum_i (1 / d_i) * sum_t m_it * w_it * x_it

with the divisors d_i and Z of a mode of `MODES`, which are totals of the whole step: over every micro-batch and rank.
So they have to be known before the step's first backward pass, and that is what `StepAggregation.of` is for.

Shapes: B rows of this rank in the step, row i with T_i tokens; N samples, P prompt groups, M active tokens in the step
over all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.loss_aggregation import (
    MODES,
    LossAggregation,
    Reducer,
    RowTotals,
    StepCounts,
    make_packed_reducer,
)
from miles.backends.training_utils.loss_hub.math_utils import weighted_reducer
from miles.integrations.row_layout import RowIndices, Rows
from miles.ray.rollout.row_groups import first_conflict, samples_by_group, totals_by_id
from miles.utils.distributed_utils import gather_from_every_rank
from miles.utils.errors import UserError
from miles.utils.loss_aggregation_args import check_divisor, check_loss_aggregation_mode


@dataclass(frozen=True)
class StepAggregation:
    """What one optimizer step's loss is divided by, for the rows of this rank.

    Attributes:
        mode: The mode.
        counts: N, P and M of the step over all ranks. P is 0 where no prompts were given; M is a sum of weights where
            there are loss weights.
        denominators: `[B]` float64 d_i of this rank's rows.
        factor: What each loss is multiplied by, `gradient_divisor` / Z.
    """

    mode: LossAggregation
    counts: StepCounts
    denominators: torch.Tensor
    factor: float
    _rows: Rows

    @classmethod
    def of(
        cls,
        mode: str,
        rows: Any,
        *,
        prompt_ids: Any = None,
        sample_ids: Any = None,
        loss_weights: Any = None,
        divisor: float | None = None,
        samples_per_prompt: int | None = None,
        gradient_divisor: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StepAggregation:
        """Count the step, from all of its rows; every rank calls this before its first backward pass of the step.

        One collective of the ranks, of a few numbers for each row.

        Args:
            mode: A name in `MODES`.
            rows: This rank's rows of all micro-batches: their masks, of values 0 and 1, as a list of `[T_i]`, padded
                `[B, T]` or a nested tensor; or their numbers of active tokens, as a list or as `[B]` integers. A rank
                may have none: `[]`.
            prompt_ids: The prompt of each row, B integers or strings, equal on every rank for the same prompt;
                `prompt_mean` needs them.
            sample_ids: The sample of each row, where a sample may have several; equal on every rank. By default each
                row is a sample.
            loss_weights: Weights >= 0 of the tokens, in the layout of the masks.
            divisor: L of `constant`.
            samples_per_prompt: Where given, how many samples every prompt must have in the step. Without it they may
                have any number.
            gradient_divisor: What the training loop divides the summed gradients of this loss by. By default the
                number of ranks, since DistributedDataParallel and FSDP average over them; 1 where gradients are
                summed, and times the number of micro-batches where the framework divides by that too.
            group: The ranks that share the step; by default all.

        Raises:
            UserError: an argument cannot be used, on any rank; or ranks disagree on one. Every rank raises it.
        """
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        gradient_divisor = size if gradient_divisor is None else gradient_divisor
        own: list[Rows] = []

        def report() -> _Report:
            check_loss_aggregation_mode(mode)
            check_divisor(MODES[mode], divisor)
            _check_positive("samples_per_prompt", samples_per_prompt)
            _check_positive("gradient_divisor", gradient_divisor)
            own.append(Rows.of(rows, loss_weights))
            totals = own[0].totals.tolist()
            prompts, samples = _ids("prompt_ids", prompt_ids, totals), _ids("sample_ids", sample_ids, totals)
            if totals and prompts is None and MODES[mode].needs_prompt_groups:
                raise UserError(f"{mode} needs prompt_ids, the prompt of each of the {len(totals)} rows; got None")
            options = {"mode": mode, "divisor": divisor, "samples_per_prompt": samples_per_prompt}
            return _Report({**options, "gradient_divisor": gradient_divisor}, totals, prompts, samples)

        rank = dist.get_rank(group) if dist.is_initialized() else 0
        totals = _totals_of_rows(gather_from_every_rank(report, group), rank)
        chosen = MODES[mode]
        denominators = torch.as_tensor(chosen.denominators(totals), dtype=torch.float64).expand(len(totals.samples))
        factor = gradient_divisor / chosen.normalizer(totals.counts)
        return cls(chosen, totals.counts, denominators.to(own[0].lengths.device), factor, own[0])

    @property
    def row_weights(self) -> torch.Tensor:
        """`[B]` float64: what each active token of a row is multiplied by, gradient_divisor / (d_i Z)."""
        return self.factor / self.denominators

    @property
    def token_weights(self) -> Any:
        """What each token's loss is multiplied by, m_it w_it gradient_divisor / (d_i Z), in the layout of the masks.

        Raises:
            UserError: only numbers of tokens were given, no masks.
        """
        rows = self._rows
        if rows.mask is None:
            raise UserError("the step was given as numbers of tokens, which have no token weights; give masks")
        weights = torch.repeat_interleave(self.row_weights, rows.lengths) * rows.mask
        return rows.unpack(weights if rows.weights is None else weights * rows.weights)

    def reducer(self, rows: RowIndices = slice(None), masks: Any = None, loss_weights: Any = None) -> Reducer:
        """Return the reducer of a micro-batch: from its per-token losses to the scalar to call `backward` on.

        The sum over the micro-batches of all ranks, divided by `gradient_divisor`, is the value of the step.

        Args:
            rows: Which of this rank's rows are in the micro-batch.
            masks: Their masks where they are not those that were given, such as with other padding; by default those.
            loss_weights: The weights of `masks`.

        Returns:
            A function of losses in the layout of the masks: `[T]` of the rows one after another for a list of masks,
            `[B, T]` for padded ones, nested for nested ones; and of K such losses at once, `[K, ...]`, to `[K]`. What
            stands at masked positions, NaN included, reaches neither the sum nor the gradient.

        Raises:
            UserError: `masks` are not masks of these rows.
        """
        own = self._rows.select(rows)
        layout = own if masks is None else Rows.of(masks, loss_weights)
        if layout.mask is None:
            raise UserError(
                "the step was given as numbers of tokens; give the masks of the micro-batch too: masks=..."
            )
        expected, found = own.totals.tolist(), layout.totals.tolist()
        if found != expected:
            raise UserError(
                f"these masks have {found} active tokens, and these rows of the step were counted with {expected}; "
                "give the masks of the same rows, in the same order"
            )
        denominators = self.denominators[rows if isinstance(rows, slice) else list(rows)]
        reduce = make_packed_reducer(layout.mask, layout.lengths, denominators=denominators.to(layout.mask.device))
        if layout.weights is not None:
            reduce = weighted_reducer(reduce, layout.weights)
        return lambda values: reduce(layout.pack(values)) * self.factor


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others of its rows.

    Attributes:
        options: What every rank must have given alike.
        totals: B numbers of active tokens, or sums of weights.
        prompts: B prompts, None where none were given.
        samples: B samples, None where each row is one.
    """

    options: dict[str, Any]
    totals: list[int | float]
    prompts: list[Hashable] | None
    samples: list[Hashable] | None


def _totals_of_rows(reports: Sequence[_Report], rank: int) -> RowTotals:
    """Return the totals of one rank's rows, from the reports of all; raises alike on every rank."""
    for key, value in reports[0].options.items():
        for other, report in enumerate(reports):
            if report.options[key] != value:
                raise UserError(
                    f"every rank must give the same {key}; rank 0 gave {value!r}, rank {other} gave "
                    f"{report.options[key]!r}"
                )
    filled = [report for report in reports if report.totals]
    if not filled:
        raise UserError("the step has no rows on any rank; there is nothing to take a mean of")
    for name in ("prompts", "samples"):
        if len({getattr(report, name) is None for report in filled}) > 1:
            raise UserError(f"some ranks gave {name[:-1]}_ids and some did not; give them on every rank, or on none")
    samples = [_samples_of(report, number) for number, report in enumerate(reports)]
    prompts = [report.prompts or [] for report in reports]
    flat = [value for report in reports for value in report.totals]
    of_sample = totals_by_id(chain(*samples), flat)
    of_prompt = totals_by_id(chain(*prompts), flat) if filled[0].prompts is not None else {}
    if of_prompt:
        _check_prompts(list(chain(*samples)), list(chain(*prompts)), reports[0].options["samples_per_prompt"])
    totals = torch.tensor(list(of_sample.values()))
    dtype = torch.float64 if totals.is_floating_point() else torch.int64
    return RowTotals(
        samples=torch.tensor([of_sample[id_] for id_ in samples[rank]], dtype=dtype),
        prompts=torch.tensor([of_prompt[id_] for id_ in prompts[rank]], dtype=dtype) if of_prompt else None,
        counts=StepCounts(len(of_sample), len(of_prompt), sum(flat)),
        divisor=reports[0].options["divisor"],
        step_samples=totals,
    )


def _samples_of(report: _Report, rank: int) -> list[Hashable]:
    return [(rank, row) for row in range(len(report.totals))] if report.samples is None else report.samples


def _check_prompts(samples: Sequence[Hashable], prompts: Sequence[Hashable], size: int | None) -> None:
    """Check that a sample answers one prompt, and that a prompt has `size` samples, where that is not None."""
    conflict = first_conflict(zip(samples, prompts, strict=True))
    if conflict is not None:
        sample, first, second = conflict
        raise UserError(
            f"sample {sample!r} has rows of two prompts, {first!r} and {second!r}; a sample answers one prompt, so "
            "give all of its rows one prompt id, or other rows other sample ids"
        )
    sizes = samples_by_group(prompts, samples)
    wrong = {prompt: number for prompt, number in sizes.items() if size not in (None, number)}
    if wrong:
        prompt, number = next(iter(wrong.items()))
        raise UserError(
            f"samples_per_prompt={size}, and {len(wrong)} of {len(sizes)} prompts have another number in this step, "
            f"for example {prompt!r} with {number}; keep groups whole, give each its own id, or leave "
            "samples_per_prompt out"
        )


def _ids(name: str, ids: Any, rows: Sequence[Any]) -> list[Hashable] | None:
    """Return one id for each row, from a list, a tensor or an array; None for None."""
    if ids is None:
        return None
    found = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(found) != len(rows):
        raise UserError(f"{name} needs one entry for each of {len(rows)} rows; got {len(found)}")
    for row, id_ in enumerate(found):
        if isinstance(id_, bool) or not isinstance(id_, (int, str, tuple)):
            raise UserError(f"{name} takes integers and strings; row {row} has {id_!r} ({type(id_).__name__})")
    return found


def _check_positive(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        raise UserError(f"{name} must be a positive integer; got {value!r} ({type(value).__name__})")
