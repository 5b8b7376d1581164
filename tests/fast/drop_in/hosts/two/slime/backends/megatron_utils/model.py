"""Megatron's training step, with its conventions of what is divided and averaged."""

from functools import partial

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import mpu
from slime.backends.megatron_utils.data import get_batch
from slime.backends.megatron_utils.loss import loss_function
from slime.observability.train_metric_utils import reduce_train_step_metrics


def forward_backward(forward_step, data_iterator, model, num_microbatches, calculate_per_token_loss):
    size = mpu.get_data_parallel_world_size(with_context_parallel=True)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    total, losses_reduced = torch.zeros((), dtype=torch.int64), []
    for _ in range(num_microbatches):
        output, loss_func = forward_step(data_iterator, model)
        loss, num_tokens, log = loss_func(output)
        total += num_tokens
        (loss if calculate_per_token_loss else loss / num_tokens / num_microbatches).backward()
        losses_reduced.append(log)
    dist.all_reduce(total, group=group)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= total if calculate_per_token_loss else size
    return losses_reduced


def train_one_step(args, data_iterator, model, optimizer, num_microbatches, step_global_batch_size):
    optimizer.zero_grad()

    def forward_step(data_iterator, model):
        batch = get_batch(
            data_iterator,
            [
                "tokens",
                "total_lengths",
                "response_lengths",
                "loss_masks",
                "advantages",
                "returns",
                "rollout_log_probs",
                "rollout_mask_sums",
            ],
        )
        output = model(batch["tokens"])
        return output, partial(loss_function, args, batch, num_microbatches, step_global_batch_size)

    losses_reduced = forward_backward(
        forward_step, data_iterator, model, num_microbatches, args.calculate_per_token_loss
    )
    optimizer.step()
    return reduce_train_step_metrics(
        losses_reduced,
        calculate_per_token_loss=args.calculate_per_token_loss,
        step_global_batch_size=step_global_batch_size,
        cp_size=mpu.get_context_parallel_world_size(),
        dp_with_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
    )
