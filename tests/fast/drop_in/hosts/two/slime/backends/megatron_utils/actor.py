"""Megatron's part of a rollout."""

import torch

from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from slime.backends.megatron_utils.data import get_data_iterator
from slime.backends.megatron_utils.model import train_one_step
from slime.observability.train_metric_utils import log_rollout_data


class MegatronActor:
    def __init__(self, args, model, optimizer):
        self.args, self.model, self.optimizer = args, model, optimizer

    def _get_rollout_data(self, rollout_data_ref):
        rollout_data = dict(rollout_data_ref)
        partition = rollout_data.pop("partition")
        for key in ["raw_reward", "total_lengths"]:
            rollout_data[key] = [rollout_data[key][row] for row in partition]
        device = torch.device("cpu")
        rollout_data["tokens"] = [tokens.to(device=device) for tokens in rollout_data["tokens"]]
        rollout_data["loss_masks"] = [mask.to(device=device) for mask in rollout_data["loss_masks"]]
        if "rollout_mask_sums" in rollout_data:
            rollout_data["rollout_mask_sums"] = rollout_data["rollout_mask_sums"].to(device=device)
        rows = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
        rollout_data["rollout_log_probs"] = [
            slice_log_prob_with_cp(log_prob, *row)
            for log_prob, row in zip(rollout_data["rollout_log_probs"], rows, strict=True)
        ]
        rollout_data["advantages"] = [
            slice_log_prob_with_cp(torch.full((row[1],), float(reward)), *row)
            for reward, row in zip(rollout_data["rewards"], rows, strict=True)
        ]
        rollout_data["returns"] = rollout_data["advantages"]
        return rollout_data

    def train(self, rollout_id, rollout_data_ref):
        """Return what is logged of the rollout, and of each step."""
        rollout_data = self._get_rollout_data(rollout_data_ref)
        data_iterator = get_data_iterator(rollout_data)[0]
        rollout_log = log_rollout_data(rollout_id, self.args, rollout_data)
        steps = zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True)
        return rollout_log, [
            train_one_step(self.args, data_iterator, self.model, self.optimizer, *step) for step in steps
        ]
