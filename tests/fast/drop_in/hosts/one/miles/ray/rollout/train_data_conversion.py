"""From samples to train data, and from there to one part per data-parallel rank."""

from typing import Any

from miles.utils.types import Sample


def convert_samples_to_train_data(
    args,
    samples: list[Sample],
    metadata: dict[str, Any],
    custom_convert_samples_to_train_data_func,
    custom_reward_post_process_func,
):
    if custom_convert_samples_to_train_data_func is not None:
        return custom_convert_samples_to_train_data_func(args, samples)

    rewards = [sample.reward for sample in samples]
    if custom_reward_post_process_func is not None:
        rewards = custom_reward_post_process_func(args, samples)

    train_data = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
    }

    loss_masks = []
    for sample in samples:
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        assert len(mask) == sample.response_length
        loss_masks.append([0] * len(mask) if sample.remove_sample else mask)
    train_data["loss_masks"] = loss_masks

    if samples[0].rollout_log_probs is not None:
        train_data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]

    if (size := metadata.get("dynamic_global_batch_size")) is not None:
        train_data["dynamic_global_batch_size"] = size

    return train_data


def split_train_data_by_dp(args, data, dp_size):
    return list(split_train_data_by_dp_raw(args, data, dp_size=dp_size))


def split_train_data_by_dp_raw(args, data: dict[str, Any], *, dp_size: int) -> list[dict[str, Any]]:
    total_lengths = [len(tokens) for tokens in data["tokens"]]
    data["total_lengths"] = total_lengths

    if args.balance_data:
        longest_first = sorted(range(len(total_lengths)), key=lambda row: -total_lengths[row])
        partitions = [sorted(longest_first[rank::dp_size]) for rank in range(dp_size)]
    else:
        partitions = [range(rank, len(total_lengths), dp_size) for rank in range(dp_size)]

    parts = []
    for rank in range(dp_size):
        rollout_data = {}
        partition = partitions[rank]
        rollout_data["partition"] = partition
        for key in [
            "tokens",
            "response_lengths",
            "rewards",
            "truncated",
            "loss_masks",
            "sample_indices",
            "rollout_log_probs",
        ]:
            if key in data:
                rollout_data[key] = [data[key][row] for row in partition]
        for key in ["raw_reward", "total_lengths", "dynamic_global_batch_size"]:
            if key in data:
                rollout_data[key] = data[key]
        parts.append(rollout_data)
    return parts
