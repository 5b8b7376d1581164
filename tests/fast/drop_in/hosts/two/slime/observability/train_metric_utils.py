"""What is logged of a rollout, and of an optimizer step."""

import torch
import torch.distributed as dist


def reduce_train_step_metrics(
    losses_reduced,
    *,
    calculate_per_token_loss,
    step_global_batch_size,
    cp_size,
    dp_with_cp_group,
):
    keys = losses_reduced[0]["keys"]
    values = torch.stack([item["values"] for item in losses_reduced]).sum(0)
    assert len(keys) + 1 == values.numel()
    dist.all_reduce(values, group=dp_with_cp_group)
    count, *sums = values.tolist()
    # Each context-parallel rank counts whole rows; the schedule's count is one for all.
    divisor = count / cp_size if calculate_per_token_loss else step_global_batch_size
    return {key: value / divisor for key, value in zip(keys, sums, strict=True)}


def log_rollout_data(rollout_id, args, rollout_data):
    from slime.backends.megatron_utils import mpu
    from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

    log_dict = {}
    ignored_keys = {
        "tokens",
        "loss_masks",
        "sample_indices",
        "rollout_ids",
        "rollout_mask_sums",
        "global_batch_sizes",
        "num_microbatches",
        "micro_batch_indices",
    }
    for key, value in rollout_data.items():
        if key in ignored_keys:
            continue
        if not isinstance(value, list | tuple):
            raise ValueError(f"Unsupported type: {type(value)} for key: {key}")
        if isinstance(value[0], torch.Tensor):
            reducer = get_sum_of_sample_mean(
                rollout_data["total_lengths"],
                rollout_data["response_lengths"],
                rollout_data["loss_masks"],
                rollout_data["rollout_mask_sums"],
            )
            share = sum(rollout_data["global_batch_sizes"]) / mpu.get_data_parallel_world_size()
            log_dict[key] = (mpu.get_context_parallel_world_size() * reducer(torch.cat(value)).item(), share)
        else:
            log_dict[key] = (sum(value), len(value))

    group = mpu.get_data_parallel_group(with_context_parallel=True)
    gathered = [None] * mpu.get_data_parallel_world_size(with_context_parallel=True)
    dist.all_gather_object(gathered, log_dict, group=group)
    totals = {key: [sum(part[key][i] for part in gathered) for i in (0, 1)] for key in log_dict}
    return {f"rollout/{key}": total / count for key, (total, count) in totals.items()}
