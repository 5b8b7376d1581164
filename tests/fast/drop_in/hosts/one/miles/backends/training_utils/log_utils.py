"""What is logged of a rollout, and of an optimizer step."""

import torch
import torch.distributed as dist

from .cp_utils import get_sum_of_sample_mean
from .parallel import get_parallel_state


def gather_log_data(metric_name, args, rollout_id, log_dict):
    dp_cp = get_parallel_state().effective_dp_cp
    gathered = [log_dict]
    if dp_cp.size > 1:
        gathered = [None] * dp_cp.size
        dist.all_gather_object(gathered, log_dict, group=dp_cp.group)
    return {f"{metric_name}/{key}": sum(part[key] for part in gathered) / dp_cp.size for key in log_dict}


def log_rollout_data(rollout_id, args, rollout_data):
    parallel_state = get_parallel_state()
    if parallel_state.tp.rank == 0 and parallel_state.is_pp_last_stage:
        cp_size = parallel_state.cp.size
        log_dict = {}
        response_lengths = rollout_data["response_lengths"]
        loss_masks = rollout_data["loss_masks"]
        total_lengths = rollout_data["total_lengths"]

        for key, val in rollout_data.items():
            if key in [
                "tokens",
                "loss_masks",
                "sample_indices",
                "max_seq_lens",
                "dynamic_global_batch_size",
            ]:
                continue
            if isinstance(val, list | tuple):
                if isinstance(val[0], torch.Tensor):
                    val = torch.cat(val).detach()
                    sum_of_sample_mean = get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks)
                    val = cp_size * sum_of_sample_mean(val) / len(loss_masks)
                else:
                    val = sum(val) / len(val)
            elif isinstance(val, torch.Tensor):
                val = val.float().mean()
            else:
                raise ValueError(f"Unsupported type: {type(val)} for key: {key}")
            log_dict[key] = val.item() if isinstance(val, torch.Tensor) else val
        return gather_log_data("rollout", args, rollout_id, log_dict)
    return None


def aggregate_train_losses(losses_reduced):
    parallel_state = get_parallel_state()
    if not losses_reduced:
        return {}
    keys = losses_reduced[0]["keys"]

    values = None
    for log_dict in losses_reduced:
        if values is None:
            values = log_dict["values"].clone()
        else:
            values += log_dict["values"]
    assert len(keys) + 1 == values.numel()

    for group in parallel_state.effective_dp_cp.groups_inner_to_outer:
        dist.all_reduce(values, group=group)

    loss_reduced = {}
    values = values.tolist()
    num_samples_or_tokens = values[0]
    for key, value in zip(keys, values[1:], strict=True):
        loss_reduced[key] = value * parallel_state.cp.size / num_samples_or_tokens
    return loss_reduced
