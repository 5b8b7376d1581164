"""The rollout side: samples become train data, and train data one part per rank."""

from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
from slime.utils.dp_schedule import build_dp_schedule


class RolloutManager:
    def __init__(self, args):
        self.args = args
        self.train_parallel_config = None

    def set_train_parallel_config(self, config):
        self.train_parallel_config = config

    def _convert_samples_to_train_data(self, samples):
        given = {sample.rollout_id for sample in samples}
        free = (number for number in range(2 * len(samples)) if number not in given)
        rollout_ids = [next(free) if sample.rollout_id is None else sample.rollout_id for sample in samples]
        train_data = {
            "tokens": [sample.tokens for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rewards": [sample.reward for sample in samples],
            "raw_reward": [sample.reward for sample in samples],
            "sample_indices": [sample.index for sample in samples],
            "rollout_ids": rollout_ids,
        }

        loss_masks = []
        for sample in samples:
            mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
            loss_masks.append([0] * len(mask) if sample.remove_sample else mask)
        train_data["loss_masks"] = loss_masks

        sums = {}
        for name, mask in zip(rollout_ids, loss_masks, strict=True):
            sums[name] = sums.get(name, 0) + sum(mask)
        train_data["rollout_mask_sums"] = [sums[name] for name in rollout_ids]

        if samples[0].rollout_log_probs is not None:
            train_data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
        return train_data

    def _split_train_data_by_dp(self, data):
        total_lengths = [len(tokens) for tokens in data["tokens"]]
        data["total_lengths"] = total_lengths

        partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build_dp_schedule(
            self.args,
            self.train_parallel_config,
            total_lengths,
            global_batch_size=self.args.global_batch_size,
            rollout_indices=data["rollout_ids"],
        )

        parts = []
        for rank, partition in enumerate(partitions):
            rollout_data = {"partition": partition}
            for key in [
                "tokens",
                "response_lengths",
                "rewards",
                "loss_masks",
                "sample_indices",
                "rollout_ids",
                "rollout_mask_sums",
                "rollout_log_probs",
            ]:
                if key in data:
                    rollout_data[key] = [data[key][row] for row in partition]
            for key in ["raw_reward", "total_lengths"]:
                rollout_data[key] = data[key]
            rollout_data["global_batch_sizes"] = global_batch_sizes
            rollout_data["num_microbatches"] = num_microbatches
            rollout_data["micro_batch_indices"] = micro_batch_indices[rank]
            tensorize_rollout_data_for_training(rollout_data)
            parts.append(rollout_data)
        return parts
