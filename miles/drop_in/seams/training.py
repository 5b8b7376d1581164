"""Where the trainer moves a shard to the device, splits it into micro-batches and logs it."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m

from miles.drop_in import edits
from miles.drop_in.seams.base import ADAPTER, AdapterSeam, assignment, called, subscript
from miles.drop_in.seams.samples import COLUMNS


class TensorMove(AdapterSeam):
    """Moves the groups' token counts to the device."""

    name = "tensor-move"
    purpose = "move prompt_mask_sums to the device as one tensor"
    looked_for = 'rollout_data["loss_masks"] = ..., where the loss masks are moved to the device'
    by_hand = f"after the loss masks are moved: {ADAPTER}.move_prompt_mask_sums(rollout_data)"

    def find(self, module: cst.Module) -> Any:
        """Return the statement that moves the loss masks."""
        self.refuse_calls(module, "move_prompt_mask_sums")
        found = edits.find_all(module, assignment(subscript("rollout_data", "loss_masks")))
        return self.only(found, 'assignment to rollout_data["loss_masks"]')

    def edit(self, module: cst.Module) -> cst.Module:
        """Move the counts after it."""
        code = f"{ADAPTER}.move_prompt_mask_sums(rollout_data)"
        return self.write_after(module, self.find(module), code)


class _BatchColumns(AdapterSeam):
    """Hands a backend's training micro-batches the groups' token counts."""

    looked_for = 'the list in get_batch(..., [..., "loss_masks", ..., "advantages", ...]) of the training step'
    by_hand = "add prompt_mask_sums to the columns that the training step fetches"

    def find(self, module: cst.Module) -> Any:
        """Return the list of columns."""
        calls = edits.find_all(module, called("get_batch"))
        lists = [node for call in calls for node in edits.find_all(call, m.List())]
        found = [node for node in lists if {"loss_masks", "advantages"} <= set(edits.string_values(node))]
        columns = self.only(found, "call of get_batch with a list with loss_masks and advantages")
        self.refuse_strings(edits.string_values(columns), COLUMNS[1:])
        return columns

    def edit(self, module: cst.Module) -> cst.Module:
        """Add the column to it."""
        return edits.add_strings(module, self.find(module), COLUMNS[1], after="loss_masks")


class MegatronColumns(_BatchColumns):
    """The columns that Megatron's training step fetches."""

    name = "megatron-columns"
    purpose = "hand Megatron's micro-batches prompt_mask_sums"


class FSDPColumns(_BatchColumns):
    """The columns that FSDP's training step fetches."""

    name = "fsdp-columns"
    purpose = "hand FSDP's micro-batches prompt_mask_sums"


class RolloutLog(AdapterSeam):
    """Leaves the new columns out of the rollout log."""

    name = "rollout-log"
    purpose = "leave the new columns out of the rollout log"
    looked_for = (
        'the list or set of ignored columns ("tokens", "loss_masks", "sample_indices", ...) in log_rollout_data'
    )
    by_hand = f"add {' and '.join(COLUMNS)} to the columns that the rollout log leaves out"

    def find(self, module: cst.Module) -> Any:
        """Return the literal of ignored columns."""
        function = self.function(module, "log_rollout_data")
        literals = edits.find_all(function, m.List() | m.Set())
        wanted = {"tokens", "loss_masks", "sample_indices"}
        found = [node for node in literals if wanted <= set(edits.string_values(node))]
        ignored = self.only(found, "list of tokens, loss_masks and sample_indices in log_rollout_data")
        self.refuse_strings(edits.string_values(ignored), COLUMNS)
        return ignored

    def edit(self, module: cst.Module) -> cst.Module:
        """Add the columns to it."""
        return edits.add_strings(module, self.find(module), *COLUMNS, after="sample_indices")


class FSDPStepTokens(AdapterSeam):
    """Counts each step's active tokens before its first micro-batch."""

    name = "fsdp-step-tokens"
    purpose = "count the active tokens of each FSDP step, which the host drops"
    looked_for = "num_steps_per_rollout = len(num_microbatches), in _train_core with data_iterator"
    by_hand = (
        f"before FSDP's first step: step_num_tokens = {ADAPTER}.count_step_tokens(self.args, data_iterator, "
        "num_microbatches, get_parallel_state().intra_dp.group)"
    )

    def find(self, module: cst.Module) -> Any:
        """Return the statement that counts the steps."""
        function = self.function(module, "_train_core")
        self.refuse_calls(function, "count_step_tokens")
        found = edits.find_all(function, assignment(m.Name("num_steps_per_rollout")))
        return self.only(found, "assignment to num_steps_per_rollout in _train_core")

    def edit(self, module: cst.Module) -> cst.Module:
        """Count the tokens after it."""
        statement = self.find(module)
        arguments = ["self.args", "data_iterator", "num_microbatches", "get_parallel_state().intra_dp.group"]
        start = f"step_num_tokens = {ADAPTER}.count_step_tokens("
        code = edits.call_code(start, arguments, depth=edits.depth(module, statement))
        return self.write_after(module, statement, code)


class FSDPBatchTokens(AdapterSeam):
    """Hands each micro-batch the active tokens of its step."""

    name = "fsdp-batch-tokens"
    purpose = "hand FSDP's micro-batches the active tokens of their step"
    looked_for = "batch = get_batch(...), in the loop over step_id of _train_core"
    by_hand = 'after FSDP\'s micro-batch is made: batch["step_num_tokens"] = step_num_tokens[step_id]'

    def find(self, module: cst.Module) -> Any:
        """Return the statement that makes the micro-batch."""
        function = self.function(module, "_train_core")
        if edits.find_all(function, assignment(subscript("batch", "step_num_tokens"))):
            raise self.error('it has been changed already: batch["step_num_tokens"] is set there')
        loops = edits.find_all(function, m.For(target=m.Name("step_id")))
        found = [
            node for loop in loops for node in edits.find_all(loop, assignment(m.Name("batch"), called("get_batch")))
        ]
        return self.only(found, "batch = get_batch(...) in a loop over step_id")

    def edit(self, module: cst.Module) -> cst.Module:
        """Put the count into the micro-batch."""
        code = 'batch["step_num_tokens"] = step_num_tokens[step_id]'
        return edits.insert_after(module, self.find(module), code)
