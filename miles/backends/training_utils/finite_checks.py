"""Refusing NaN and infinity where training would go on with them. Nothing here turns them into something else."""

import math
from collections.abc import Mapping, Sequence

import torch

from miles.backends.training_utils.cp_utils import get_local_response_loss_masks
from miles.utils.distributed_utils import all_gather_objects
from miles.utils.types import RolloutBatch, Sample


class NonFiniteError(RuntimeError):
    """Training produced a NaN or an infinity; raised on every rank alike, before the optimizer step."""


def refuse_non_finite_samples(rollout_id: int, samples: Sequence[Sample]) -> None:
    """Stop where the policy itself sampled with a log-prob that is NaN or infinite; every rank has all samples.

    Raises:
        NonFiniteError: naming the sample.
    """
    for sample in samples:
        if not all(map(math.isfinite, sample.rollout_log_probs or ())):
            raise NonFiniteError(
                f"rollout {rollout_id}: sample {sample.index} was sampled with log-probs that are not finite; the "
                "weights have diverged. Lower --lr or --clip-grad, or go back to an earlier checkpoint"
            )


def refuse_non_finite_log_probs(rollout_id: int, data: RolloutBatch) -> None:
    """Stop every rank where a computed log-prob at an active token is NaN or infinite on one of them.

    Args:
        rollout_id: Number of the rollout.
        data: This rank's rows; of `log_probs` and `ref_log_probs` those that are there are looked at.

    Raises:
        NonFiniteError: naming the column, the sample and the position.
    """
    findings = [
        finding for column in ("log_probs", "ref_log_probs") if (finding := _find_non_finite(data, column)) is not None
    ]
    found = [finding for rank_findings in all_gather_objects(findings) for finding in rank_findings]
    if found:
        raise NonFiniteError(
            f"rollout {rollout_id}: {found[0]}; the weights have diverged (lower --lr or --clip-grad), or the "
            "checkpoint they came from had"
        )


def refuse_non_finite_step(rollout_id: int, step_id: int, losses: Mapping[str, float], grad_norm: float) -> None:
    """Stop before an optimizer step that would spoil the weights.

    Args:
        rollout_id: Number of the rollout.
        step_id: Number of the step in it.
        losses: The step's losses over all ranks; "loss" is looked at.
        grad_norm: Global norm of the gradient.

    Raises:
        NonFiniteError: naming the step and both values.
    """
    loss = losses.get("loss", 0.0)  # a custom loss need not report it
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise NonFiniteError(
            f"rollout {rollout_id}, step {step_id}: loss {loss}, gradient norm {grad_norm}; the optimizer step was "
            "not made. Lower --lr, or look at the rollout's rewards and log-probs"
        )


def _find_non_finite(data: RolloutBatch, column: str) -> str | None:
    """Describe the first active token of this rank whose value is not finite."""
    rows = data.get(column)
    if not rows:
        return None
    masks = get_local_response_loss_masks(data["total_lengths"], data["response_lengths"], data["loss_masks"])
    if not (~torch.cat(rows).isfinite() & torch.cat(masks).bool()).any():
        return None
    names = data.get("sample_indices") or range(len(rows))  # a custom conversion may leave the indices out
    for index, values, mask in zip(names, rows, masks, strict=True):
        positions = (~values.isfinite() & mask.bool()).nonzero()
        if len(positions):
            position = positions[0].item()
            return f"{column} of sample {index} is {values[position].item()} at response token {position}"
    raise AssertionError("the batch has a non-finite value that no row has")
