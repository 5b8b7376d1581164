"""Lists of numbers become tensors before they travel."""

import torch

_DTYPES = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}


def tensorize_rollout_data_for_training(rollout_data):
    for key, dtype in _DTYPES.items():
        if key in rollout_data:
            rollout_data[key] = [torch.tensor(value, dtype=dtype) for value in rollout_data[key]]
    if "rollout_mask_sums" in rollout_data:
        rollout_data["rollout_mask_sums"] = torch.tensor(rollout_data["rollout_mask_sums"], dtype=torch.float32)
