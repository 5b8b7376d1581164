"""`loss_function`: run the configured loss on a micro-batch and scale it so that the step's gradient is exact.

Every micro-batch's backward pass has to add (1 / Z) * its share of the numerator to the final gradient. Backends treat
what they are given differently, and this is the one place that undoes it:

- FSDP2 averages gradients over the data-parallel mesh and adds up micro-batches: multiply by the mesh's size.
- Megatron-Core, not per-token, divides by `num_microbatches` and averages over DP x CP: multiply by both.
- Megatron-Core, per-token, sums over everything and divides once by the token counts summed over DP x CP. Every
  context-parallel rank reports whole-response counts, which makes that divisor cp_size * M: multiply by cp_size, and
  by M / Z where a correction or loss weights make Z another number than M.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from miles.backends.training_utils.cp_utils import as_row_tensor
from miles.backends.training_utils.loss_aggregation import LossAggregation, StepCounts, mask_sums
from miles.backends.training_utils.loss_hub.advantages import compute_advantages, normalize_advantages
from miles.backends.training_utils.loss_hub.losses import get_loss_function
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.loss_term import LossTerm, MetricDict
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import RolloutBatch

LogDict = dict[str, Any]


def get_active_token_count(loss_masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the number of active tokens of B rows, an int64 scalar; a fully masked row adds none."""
    return mask_sums(loss_masks).sum()


def get_token_counts_by_step(
    loss_masks: Sequence[torch.Tensor], num_steps: int, step_row_counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's active tokens in each optimizer step, `[num_steps]` int64; sum it over the DP ranks for M.

    Args:
        loss_masks: Masks of all of the rank's rows in step order.
        num_steps: Optimizer steps that the rows make up.
        step_row_counts: Rows of each step; equal parts if None.

    Raises:
        ValueError: the rows do not make up the steps.
    """
    if step_row_counts is None:
        if num_steps < 1 or len(loss_masks) % num_steps:
            raise ValueError(f"{len(loss_masks)} rows do not divide into {num_steps} optimizer steps of equal size")
        step_row_counts = [len(loss_masks) // num_steps] * num_steps
    if len(step_row_counts) != num_steps or sum(step_row_counts) != len(loss_masks):
        raise ValueError(
            f"step_row_counts {list(step_row_counts)} do not divide {len(loss_masks)} rows into {num_steps} steps"
        )
    return torch.stack([part.sum() for part in mask_sums(loss_masks).split(list(step_row_counts))])


def scale_data_parallel_token_mean_loss(
    loss: torch.Tensor, *, global_num_tokens: float | torch.Tensor, data_parallel_size: int
) -> torch.Tensor:
    """Return loss * data_parallel_size / M, for a backend that averages gradients over data-parallel ranks.

    Args:
        loss: This micro-batch's sum over active tokens.
        global_num_tokens: M, the active tokens of the whole optimizer step over all ranks.
        data_parallel_size: Ranks over which the backend averages.

    Raises:
        ValueError: M is not positive.
    """
    if not global_num_tokens > 0:
        raise ValueError(f"token_mean needs at least one active token in the optimizer step, got {global_num_tokens}")
    return loss * data_parallel_size / global_num_tokens


def loss_function(
    args: Options,
    batch: RolloutBatch,
    num_microbatches: int,
    logits: torch.Tensor,
    apply_megatron_loss_scaling: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, LogDict]:
    """Compute a micro-batch's loss, scaled for the backend, its normalizer and its metrics.

    Args:
        args: Reads `loss_type`, the aggregation mode, `qkv_format`, `global_batch_size` and what the loss reads.
        batch: Micro-batch; "step_counts" (StepCounts) gives N and M of the step. Without it N is
            `args.global_batch_size` and, under `token_mean`, the caller divides by M.
        num_microbatches: Micro-batches of this rank in the step.
        logits: Model output.
        apply_megatron_loss_scaling: Scale for Megatron-Core instead of FSDP2.

    Returns:
        `(scaled_loss, normalizer, log_dict)`: a scalar to call backward on; int64 scalar, the micro-batch's active
        tokens under per-token loss, else 1; and `{"keys", "values"}` with the number of samples first, or, where a key
        is not normalized by it, `{"keys", "values", "normalizers"}` with an int64 count for each key. Values are local
        sums, detached, float32; `aggregate_train_losses` adds and divides them.

    Raises:
        ValueError: a column is missing, or the mode does not exist.
    """
    args = Options.of(args)
    per_token = LossAggregation.of(args).counts_tokens
    term = LossTerm.of(Responses(args, batch))
    loss, metrics = _checked_loss(args, get_loss_function(args)(args, batch, logits, term.default_reducer()))
    if args.loss_type == "custom_loss" or not loss.requires_grad:
        # Every micro-batch has to reach every parameter, or the other ranks wait for its gradients. A sum over no
        # elements is 0 with a zero gradient, whatever the logits hold; it costs a gradient as large as the logits.
        loss = loss + logits.reshape(-1)[:0].sum()
    num_tokens = get_active_token_count(batch["loss_masks"]).to(logits.device)
    normalizer = num_tokens if per_token else torch.ones_like(num_tokens)
    scaled = _scale(term, loss, num_microbatches, megatron=apply_megatron_loss_scaling)
    num_samples = torch.as_tensor(_num_samples(batch), dtype=torch.int64, device=logits.device)
    totals = {"samples": num_samples, "tokens": num_tokens, "term": term.row_totals.sum().to(logits.device)}
    return scaled, normalizer, _log_dict(metrics, totals, plain_unit="term" if per_token else "samples")


def _checked_loss(args: Options, result: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return a loss function's result, after holding a custom one to its contract."""
    if args.loss_type != "custom_loss":
        return result
    wanted = f"{args.custom_loss_function_path} must return (loss, metrics)"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise UserError(f"{wanted}, a scalar tensor and a dictionary; got {type(result).__name__}")
    for name, value in [("the loss", result[0]), *result[1].items()]:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"{wanted} with {name} a scalar tensor; got {got}")
    return result[0].reshape(()), result[1]


def _scale(term: LossTerm, loss: torch.Tensor, num_microbatches: int, *, megatron: bool) -> torch.Tensor:
    """Apply the backend's factor of the module docstring."""
    args, state = term.responses.args, get_parallel_state()
    counts: StepCounts | None = term.responses.batch.get("step_counts")
    mode = LossAggregation.of(args)
    if mode.counts_tokens:
        if counts is None or term.counts is None:  # the caller divides by M
            return loss * state.cp.size if megatron else loss
        normalizer = mode.normalizer(term.counts)
        if megatron:
            # Megatron divides by the active tokens, M; the term may count others.
            return loss * state.cp.size * (counts.num_tokens / normalizer)
        return scale_data_parallel_token_mean_loss(
            loss, global_num_tokens=normalizer, data_parallel_size=state.intra_dp.size
        )
    num_samples = args.global_batch_size if counts is None else counts.num_samples
    factor = num_microbatches * state.intra_dp_cp.size if megatron else state.intra_dp.size
    return loss * factor / num_samples


def _num_samples(batch: RolloutBatch) -> int | torch.Tensor:
    """Return the samples that start in this micro-batch: its rows, or the rollouts whose first row it holds."""
    rollout_counts = batch.get("rollout_counts")
    return len(batch["response_lengths"]) if rollout_counts is None else torch.as_tensor(rollout_counts).sum()


def _log_dict(metrics: Mapping[str, torch.Tensor], totals: Mapping[str, torch.Tensor], *, plain_unit: str) -> LogDict:
    """Pack metric sums with the counts that normalize them.

    Args:
        metrics: Local sums; a plain dictionary's are all normalized by `plain_unit`.
        totals: The micro-batch's "samples", its active "tokens", and what the main "term" counts of them.
        plain_unit: "samples" or "term".
    """
    device = totals["samples"].device
    values = [torch.as_tensor(value, dtype=torch.float32, device=device).detach() for value in metrics.values()]
    if isinstance(metrics, MetricDict):
        units = [metrics.units.get(key, "samples") for key in metrics]
    else:
        units = [plain_unit] * len(metrics)
    if set(units) <= {"samples"}:
        return {"keys": list(metrics), "values": torch.stack([totals["samples"].float(), *values])}
    normalizers = torch.stack([totals[unit].to(totals["term"].dtype) for unit in units])
    return {"keys": list(metrics), "values": torch.stack(values), "normalizers": normalizers}


def compute_advantages_and_returns(args: Options, rollout_data: RolloutBatch) -> None:
    """Add "advantages" and "returns" to the rank's rows, in place.

    Args:
        args: Reads `advantage_estimator`, `normalize_advantages`, `qkv_format`.
        rollout_data: "rewards", "loss_masks", "total_lengths", "response_lengths" of B rows. The new columns hold B
            rows `[T_i]` float32, T_i being the response tokens on this rank.

    Raises:
        ValueError: unknown estimator.
    """
    args = Options.of(args)
    masks = Responses(args, rollout_data).masks
    rewards = as_row_tensor(rollout_data["rewards"], like=masks).float()
    advantages = compute_advantages(args.advantage_estimator, rewards, masks)
    if args.normalize_advantages:
        advantages = normalize_advantages(advantages, masks)
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = advantages
