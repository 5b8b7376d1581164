"""A schedule with the conventions of Megatron-Core: what it divides by, and what data parallelism then averages."""

import torch
import torch.distributed as dist

from miles.backends.training_utils.parallel import get_parallel_state


def forward_backward(*, forward_step_func, data_iterator, model, num_microbatches, calculate_per_token_loss):
    dp_cp = get_parallel_state().intra_dp_cp
    total_num_tokens = torch.zeros((), dtype=torch.int64)
    losses_reduced = []
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, model)
        loss, num_tokens, log = loss_func(output)
        total_num_tokens += num_tokens
        if not calculate_per_token_loss:
            loss = loss / num_tokens / num_microbatches
        loss.backward()
        losses_reduced.append(log)

    if dp_cp.size > 1:
        dist.all_reduce(total_num_tokens, group=dp_cp.group)
    for parameter in model.parameters():
        if dp_cp.size > 1:
            dist.all_reduce(parameter.grad, group=dp_cp.group)
        parameter.grad /= total_num_tokens if calculate_per_token_loss else dp_cp.size
    return losses_reduced
