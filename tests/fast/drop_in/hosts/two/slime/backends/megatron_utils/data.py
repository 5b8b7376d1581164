"""Micro-batches of a rank's rows."""

import torch

from slime.backends.megatron_utils.cp_utils import local_positions


class DataIterator:
    def __init__(self, rollout_data, micro_batch_indices):
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys):
        rows = self.micro_batch_indices[self.offset]
        self.offset += 1
        values = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if value is None else [value[row] for row in rows] for key, value in values.items()}


def get_data_iterator(rollout_data):
    return [DataIterator(rollout_data, rollout_data["micro_batch_indices"])]


def get_batch(data_iterator, keys):
    batch = data_iterator.get_next(keys)
    batch["unconcat_tokens"] = batch["tokens"]
    batch["tokens"] = torch.cat([tokens[local_positions(tokens.numel())] for tokens in batch["tokens"]])
    return batch
