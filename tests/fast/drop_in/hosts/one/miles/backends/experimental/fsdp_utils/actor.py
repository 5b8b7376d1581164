"""FSDP's part of a rollout: each micro-batch adds its gradient, and the ranks' gradients are averaged."""

import torch.distributed as dist

from miles.backends.training_utils.data import (
    compute_advantages_and_returns,
    get_batch,
    get_data_iterator,
    get_rollout_data,
)
from miles.backends.training_utils.log_utils import aggregate_train_losses, log_rollout_data
from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.parallel import get_parallel_state


class FSDPActor:
    def __init__(self, args, model, optimizer):
        self.args, self.model, self.optimizer = args, model, optimizer

    def train(self, rollout_id, rollout_data_ref):
        """Return what is logged of the rollout, and of each step."""
        rollout_data = get_rollout_data(self.args, rollout_data_ref)
        return self._train_core(rollout_id=rollout_id, rollout_data=rollout_data)

    def _train_core(self, rollout_id, rollout_data):
        data_iterator, num_microbatches = get_data_iterator(self.args, self.model, rollout_data)
        data_iterator = data_iterator[0]

        compute_advantages_and_returns(self.args, rollout_data)
        rollout_log = log_rollout_data(rollout_id, self.args, rollout_data)

        data_iterator.reset()
        num_steps_per_rollout = len(num_microbatches)
        steps = []
        for step_id in range(num_steps_per_rollout):
            self.optimizer.zero_grad()
            losses_reduced = []
            for _ in range(num_microbatches[step_id]):
                batch = get_batch(
                    data_iterator,
                    [
                        "tokens",
                        "loss_masks",
                        "total_lengths",
                        "response_lengths",
                        "max_seq_lens",
                        "advantages",
                        "returns",
                        "rollout_log_probs",
                    ],
                    self.args.qkv_format,
                )
                log_dict = self._train_step(
                    batch=batch,
                    num_microbatches=num_microbatches[step_id],
                )
                losses_reduced.append(log_dict)

            self._average_gradients(get_parallel_state().intra_dp)
            self.optimizer.step()
            steps.append(aggregate_train_losses(losses_reduced))
        return rollout_log, steps

    def _train_step(self, batch, num_microbatches):
        logits = self.model(batch["tokens"])
        loss, _, log_dict = loss_function(
            args=self.args,
            batch=batch,
            num_microbatches=num_microbatches,
            logits=logits,
            apply_megatron_loss_scaling=False,
        )
        loss.backward()
        return log_dict

    def _average_gradients(self, dp):
        for parameter in self.model.parameters():
            if dp.size > 1:
                dist.all_reduce(parameter.grad, group=dp.group)
            parameter.grad /= dp.size
