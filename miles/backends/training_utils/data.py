"""Shard -> tensors -> micro-batches, with the counts of each optimizer step known before its first micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from miles.backends.training_utils.cp_utils import get_local_response_loss_masks, slice_with_cp
from miles.backends.training_utils.loss import get_token_counts_by_step
from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.number_lists import flat_tensor
from miles.utils.options import Options
from miles.utils.seqlen_balancing import pack_by_token_budget
from miles.utils.types import SHARD_COLUMNS, RolloutBatch

TOKEN_COLUMNS = {
    "tokens": torch.int64,
    "loss_masks": torch.int64,
    "loss_weights": torch.float32,
    "rollout_log_probs": torch.float32,
}
"""Columns with one list per row, which become one tensor per row."""

COMPUTED_COLUMNS = dict.fromkeys(("log_probs", "ref_log_probs", "advantages", "returns", "values"), torch.float32) | {
    "kept_masks": torch.int64
}
"""Columns with one tensor per row that training adds."""

SCALAR_COLUMNS = dict.fromkeys(
    ("prompt_mask_sums", "rollout_mask_sums", "rollout_counts", "rollout_indices", "prompt_indices"), torch.int64
)
"""Columns with one number per row that the loss reads on the device, which become one tensor."""


def move_to_device(shard: dict[str, Any], device: torch.device | str) -> RolloutBatch:
    """Turn a shard's columns into tensors, with one transfer for each column.

    Args:
        shard: A shard of `split_train_data_by_dp` after `process_rollout_data_shard`.
        device: Where the loss runs.

    Returns:
        A new batch: `TOKEN_COLUMNS` as B 1-D tensors, `SCALAR_COLUMNS` as one `[B]` tensor, the rest unchanged.
        Tokens and masks are whole; log-probs are sliced to this context-parallel rank's tokens ("thd").
    """
    batch = dict(shard)
    for key, dtype in TOKEN_COLUMNS.items():
        if key in shard:
            flat = flat_tensor(shard[key], dtype).to(device)
            lengths = [len(row) for row in shard[key]]
            batch[key] = list(flat.split(lengths)) if lengths else []
    if "rollout_log_probs" in batch:
        batch["rollout_log_probs"] = get_local_response_loss_masks(
            batch["total_lengths"], batch["response_lengths"], batch["rollout_log_probs"]
        )
    for key, dtype in SCALAR_COLUMNS.items():
        if key in shard:
            batch[key] = torch.tensor(shard[key], dtype=dtype).to(device)
    return batch


def get_step_counts(rollout_data: RolloutBatch) -> list[StepCounts]:
    """Return N, P and M of each optimizer step over all data-parallel ranks, from one int64 collective.

    Args:
        rollout_data: The rank's rows; reads "loss_masks", "step_row_counts" and, where present, "rollout_counts" and
            "prompt_counts".
    """
    step_row_counts = rollout_data["step_row_counts"]
    num_steps, num_rows = len(step_row_counts), len(rollout_data["loss_masks"])
    samples = _sums_by_step(rollout_data.get("rollout_counts", [1] * num_rows), step_row_counts)
    prompts = _sums_by_step(rollout_data.get("prompt_counts", [0] * num_rows), step_row_counts)
    tokens = get_token_counts_by_step(rollout_data["loss_masks"], num_steps, step_row_counts)
    local = torch.stack([samples.to(tokens.device), prompts.to(tokens.device), tokens], dim=1)
    return [StepCounts(*counts) for counts in get_parallel_state().intra_dp.all_reduce(local).tolist()]


def _sums_by_step(row_counts: Sequence[int] | torch.Tensor, step_row_counts: Sequence[int]) -> torch.Tensor:
    parts = torch.as_tensor(row_counts, dtype=torch.int64).split(list(step_row_counts))
    return torch.stack([part.sum() for part in parts])


class DataIterator:
    """Micro-batches of a rank's rows, in schedule order.

    Args:
        rollout_data: The rank's rows.
        micro_batch_indices: Row positions of each micro-batch, steps one after another; a list may be empty.
        step_counts: The StepCounts of each micro-batch's step.

    Attributes:
        step_facts: More of each micro-batch's step, by the name under which the micro-batch has it; `term_counts`
            differs from `step_counts` where a correction or loss weights change what is counted.
    """

    def __init__(
        self, rollout_data: RolloutBatch, micro_batch_indices: list[list[int]], step_counts: list[StepCounts]
    ) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.step_counts = step_counts
        self.step_facts: list[dict[str, Any]] = [{"term_counts": counts} for counts in step_counts]
        self.offset = 0

    def get_next(self) -> RolloutBatch:
        """Return every per-row column of the next micro-batch's rows, and its step's "step_counts" and facts.

        A micro-batch without rows comes as one row without tokens that counts as no sample, so that whoever handles
        rows, a plug-in say, need not think of it.
        """
        rows = self.micro_batch_indices[self.offset]
        num_rows = len(self.rollout_data["tokens"])
        batch: RolloutBatch = {"step_counts": self.step_counts[self.offset], **self.step_facts[self.offset]}
        for key, column in self.rollout_data.items():
            if key in SHARD_COLUMNS or not isinstance(column, (list, torch.Tensor)) or len(column) != num_rows:
                continue
            if not rows:
                batch[key] = _blank_entry(key, column)
            else:
                batch[key] = column[rows] if isinstance(column, torch.Tensor) else [column[row] for row in rows]
        if not rows:
            batch["rollout_counts"] = torch.zeros(1, dtype=torch.int64)
        self.offset += 1
        return batch

    def peek_tokens(self) -> dict[str, int | float]:
        """Return the active tokens of the next micro-batch's step, those left in its main term, and what that counts.

        Without rejection and loss weights all three are the same number.
        """
        counts, facts = self.step_counts[self.offset], self.step_facts[self.offset]
        return {
            "num_tokens": counts.num_tokens,
            "num_kept_tokens": facts.get("num_kept_tokens", counts.num_tokens),
            "num_counted_tokens": facts["term_counts"].num_tokens,
        }

    def skip(self, num_microbatches: int) -> None:
        """Leave the next micro-batches out."""
        self.offset += num_microbatches

    def reset(self) -> DataIterator:
        """Go back to the first micro-batch and return self."""
        self.offset = 0
        return self


def _blank_entry(key: str, column: list[Any] | torch.Tensor) -> list[Any] | torch.Tensor:
    """Return a column's entry for the one row of an empty micro-batch: no tokens, a length of 0, nothing else.

    The length that "bshd" pads to is that of the other rows, since the model runs on a row of padding.
    """
    if isinstance(column, torch.Tensor):
        return column.new_zeros(1)
    if key in TOKEN_COLUMNS or key in COMPUTED_COLUMNS:
        dtype = (TOKEN_COLUMNS | COMPUTED_COLUMNS)[key]
        return [column[0].new_zeros(0) if column else torch.zeros(0, dtype=dtype)]
    if key == "max_seq_lens":
        return [max(column, default=0)]
    return [0 if key.endswith("_lengths") else None]


def get_data_iterator(args: Options, model: Any, rollout_data: RolloutBatch) -> tuple[list[DataIterator], list[int]]:
    """Schedule the rank's rows into micro-batches.

    Fixed schedule: `args.micro_batch_size` rows each, in order. With `args.use_dynamic_batch_size`: as few as fit
    `args.max_tokens_per_gpu` tokens for each context-parallel rank; a longer row runs alone. All data-parallel ranks
    get the same number in each step, with virtual pipeline stages a multiple of the pipeline's length, if need be by
    empty micro-batches.

    Args:
        args: Reads the three options above.
        model: Unused; the host's signature.
        rollout_data: The rank's rows, from `move_to_device`.

    Returns:
        One iterator for each virtual pipeline stage, and the number of micro-batches of each step.
    """
    args, state = Options.of(args), get_parallel_state()
    step_row_counts = rollout_data["step_row_counts"]
    schedule, start = [], 0
    for num_rows in step_row_counts:
        lengths = rollout_data["total_lengths"][start : start + num_rows]
        schedule.append([[start + row for row in rows] for rows in _micro_batches(args, lengths, state.cp.size)])
        start += num_rows
    local = torch.tensor([len(step) for step in schedule], dtype=torch.int64)
    largest = state.intra_dp.all_reduce(local, op=dist.ReduceOp.MAX).tolist()
    multiple = state.microbatch_group_size_per_vp_stage if (state.vpp_size or 1) > 1 else 1
    num_microbatches = [-(-size // multiple) * multiple for size in largest]
    counts = get_step_counts(rollout_data)
    indices, step_counts = [], []
    for step, size, count in zip(schedule, num_microbatches, counts, strict=True):
        indices += step + [[] for _ in range(size - len(step))]
        step_counts += [count] * size
    return [DataIterator(rollout_data, indices, step_counts) for _ in range(state.vpp_size or 1)], num_microbatches


def _micro_batches(args: Options, lengths: Sequence[int], cp_size: int) -> list[list[int]]:
    """Return the row positions of each micro-batch of one step, at least one (maybe empty) micro-batch."""
    if args.use_dynamic_batch_size:
        assert args.max_tokens_per_gpu is not None  # validation demands it
        micro_batches = pack_by_token_budget(lengths, args.max_tokens_per_gpu * cp_size)
    else:
        size = args.micro_batch_size
        micro_batches = [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    return micro_batches or [[]]


def get_batch(
    data_iterator: DataIterator, *, pad_token_id: int = 0, device: torch.device | str = "cpu"
) -> RolloutBatch:
    """Return the next micro-batch with its rows packed for the model ("thd").

    Args:
        data_iterator: Source of rows.
        pad_token_id: Fills the zigzag padding of context parallelism and the one position of an empty micro-batch.
        device: Where an empty micro-batch is made; other tensors stay where they are.

    Returns:
        The columns of `DataIterator.get_next` and: "unconcat_tokens", B rows `[total_length]` int64; "tokens" and
        "position_ids" `[1, T_all]` int64, this context-parallel rank's packed share; "cu_seqlens" `[B + 1]` int32,
        where whole (padded) rows begin and end; "max_seqlen" int.
    """
    batch = data_iterator.get_next()
    rows = batch["unconcat_tokens"] = batch["tokens"]
    blank = torch.full((1,), pad_token_id, dtype=torch.int64, device=device)
    packed = rows if any(row.numel() for row in rows) else [blank]
    cp_size = get_parallel_state().cp.size
    positions = [torch.arange(row.size(0), device=row.device) for row in packed]
    local_rows = [slice_with_cp(row, pad_token_id) for row in packed]
    lengths = torch.tensor([row.size(0) * cp_size for row in local_rows], dtype=torch.int32)
    batch["tokens"] = torch.cat(local_rows).unsqueeze(0)
    batch["position_ids"] = torch.cat([slice_with_cp(row, 0) for row in positions]).unsqueeze(0)
    batch["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(packed[0].device)
    batch["max_seqlen"] = int(lengths.max())
    return batch
