"""Megatron's part of a rollout."""

from miles.backends.megatron_utils.model import train_one_step
from miles.backends.training_utils.data import compute_advantages_and_returns, get_data_iterator, get_rollout_data
from miles.backends.training_utils.log_utils import log_rollout_data


class MegatronActor:
    def __init__(self, args, model, optimizer):
        self.args, self.model, self.optimizer = args, model, optimizer

    def train(self, rollout_id, rollout_data_ref):
        """Return what is logged of the rollout, and of each step."""
        rollout_data = get_rollout_data(self.args, rollout_data_ref)
        data_iterator, num_microbatches = get_data_iterator(self.args, self.model, rollout_data)
        compute_advantages_and_returns(self.args, rollout_data)
        rollout_log = log_rollout_data(rollout_id, self.args, rollout_data)
        steps = [
            train_one_step(self.args, data_iterator[0], self.model, self.optimizer, number)
            for number in num_microbatches
        ]
        return rollout_log, steps
