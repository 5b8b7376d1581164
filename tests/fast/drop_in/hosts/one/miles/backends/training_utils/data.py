"""From a rank's part of the train data to micro-batches of tensors."""

from collections.abc import Sequence

import torch

from .cp_utils import local_positions, local_response_rows, slice_log_prob_with_cp
from .parallel import get_parallel_state


def get_rollout_data(args, rollout_data_ref):
    rollout_data = dict(rollout_data_ref)
    rollout_data["total_lengths"] = [len(tokens) for tokens in rollout_data["tokens"]]
    rollout_data["raw_reward"] = [rollout_data["raw_reward"][row] for row in rollout_data["partition"]]
    rollout_data.pop("partition")
    rollout_data["tokens"] = [torch.tensor(tokens, dtype=torch.long) for tokens in rollout_data["tokens"]]
    rollout_data["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in rollout_data["loss_masks"]]

    if "rollout_log_probs" in rollout_data:
        rollout_data["rollout_log_probs"] = [
            torch.tensor(slice_log_prob_with_cp(log_probs, total_length, response_length, args.qkv_format))
            for log_probs, total_length, response_length in zip(
                rollout_data["rollout_log_probs"],
                rollout_data["total_lengths"],
                rollout_data["response_lengths"],
                strict=True,
            )
        ]
    return rollout_data


def compute_advantages_and_returns(args, rollout_data):
    """Every token of a response has the response's reward for its advantage."""
    rollout_data["advantages"] = [
        torch.full((len(local_response_rows(total_length, response_length)),), float(reward))
        for reward, total_length, response_length in zip(
            rollout_data["rewards"], rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True
        )
    ]
    rollout_data["returns"] = rollout_data["advantages"]


class DataIterator:
    """Micro-batches of the rows in their order, or by index lists."""

    def __init__(self, rollout_data, micro_batch_size=None, micro_batch_indices=None):
        self.rollout_data = rollout_data
        self.micro_batch_size = micro_batch_size
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys):
        if self.micro_batch_indices is not None:
            rows = self.micro_batch_indices[self.offset]
            self.offset += 1
        else:
            rows = range(self.offset, self.offset + self.micro_batch_size)
            self.offset += self.micro_batch_size
        values = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if value is None else [value[row] for row in rows] for key, value in values.items()}

    def reset(self):
        self.offset = 0
        return self


def get_data_iterator(args, model, rollout_data):
    """Return the iterators, and the number of micro-batches of each optimizer step."""
    dp_size = get_parallel_state().effective_dp.size
    num_rows = len(rollout_data["total_lengths"])
    global_batch_size = rollout_data.get("dynamic_global_batch_size", args.global_batch_size)
    rows_per_step = global_batch_size // dp_size
    num_steps = num_rows // rows_per_step
    num_microbatches = [rows_per_step // args.micro_batch_size] * num_steps
    return [DataIterator(rollout_data, args.micro_batch_size)], num_microbatches


def get_batch(data_iterator: DataIterator, keys: Sequence[str], qkv_format: str = "thd"):
    assert "tokens" in keys
    batch = data_iterator.get_next(keys)
    batch["unconcat_tokens"] = batch["tokens"]
    batch["tokens"] = torch.cat([tokens[local_positions(tokens.numel())] for tokens in batch["tokens"]])
    return batch
