"""What a step of rows looks like to the layer: arguments, samples, counts, and zigzag positions by a slow walk."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from miles.backends.training_utils.parallel import GroupInfo, ParallelState
from miles.utils.types import Sample
from tests.fast import oracle
from tests.fast.oracle import Row


def namespace(**overrides: Any) -> Namespace:
    """A resolved argument namespace as the command line would leave it, GRPO and legacy defaults."""
    values = {
        "loss_aggregation": "sample_mean",
        "loss_aggregation_divisor": None,
        "calculate_per_token_loss": False,
        "custom_pg_loss_reducer_function_path": None,
        "loss_type": "policy_loss",
        "custom_loss_function_path": None,
        "prompt_groups": "complete",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "global_batch_size": 4,
        "num_steps_per_rollout": None,
        "micro_batch_size": 1,
        "use_dynamic_batch_size": False,
        "max_tokens_per_gpu": None,
        "balance_data": False,
        "advantage_estimator": "grpo",
        "grpo_std_normalization": True,
        "rewards_normalization": True,
        "normalize_advantages": False,
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
        "eps_clip_c": None,
        "value_clip": 0.2,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "use_unbiased_kl": False,
        "use_tis": False,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "custom_tis_function_path": None,
        "get_mismatch_metrics": False,
        "use_rollout_logprobs": False,
        "qkv_format": "thd",
        "rollout_temperature": 1.0,
        "log_probs_chunk_size": -1,
        "reward_key": None,
        "train_backend": "fsdp",
        "seed": 0,
    }
    assert overrides.keys() <= values.keys(), overrides.keys() - values.keys()
    values.update(overrides)
    values["calculate_per_token_loss"] |= values["loss_aggregation"] == "token_mean"
    return Namespace(**values)


def mode_namespace(mode: str, divisor: float | None = None, **overrides: Any) -> Namespace:
    """The namespace of one mode; `constant` gets a divisor if none is named."""
    if mode == "constant" and divisor is None:
        divisor = 8.0
    return namespace(loss_aggregation=mode, loss_aggregation_divisor=divisor, **overrides)


def samples_of(rows: Sequence[Row]) -> list[Sample]:
    """Samples with the rows' masks, groups and rollouts; rows of one rollout share a reward."""
    return [
        Sample(
            group_index=row.group,
            index=i,
            rollout_id=row.rollout,
            tokens=[1 + (7 * i + 3 * t) % 5 for t in range(row.total_length)],
            response_length=row.response_length,
            reward=float((i if row.rollout is None else row.rollout) % 3),
            loss_mask=list(row.mask),
            status=Sample.Status.COMPLETED,
        )
        for i, row in enumerate(rows)
    ]


def batch_sizes(rows: Sequence[Row]) -> dict[str, Any]:
    """The batch-size arguments under which the rows are one optimizer step."""
    sizes = {len(members) for members in oracle.groups(rows)}
    num_rollouts = len(oracle.rollouts(rows))
    num_groups = len(oracle.groups(rows))
    return {
        "prompt_groups": "complete" if len(sizes) == 1 and num_rollouts == len(rows) else "ragged",
        "rollout_batch_size": num_groups,
        "n_samples_per_prompt": max(num_rollouts // num_groups, 1),
        "global_batch_size": num_rollouts,
    }


def chunk_positions(total_length: int, cp_rank: int, cp_size: int) -> list[int | None]:
    """Token positions on a zigzag rank in storage order, None for padding: two of `2 * cp_size` equal chunks."""
    if cp_size == 1:
        return list(range(total_length))
    chunk = -(-total_length // (2 * cp_size))
    owned = [*range(cp_rank * chunk, (cp_rank + 1) * chunk)]
    owned += range((2 * cp_size - 1 - cp_rank) * chunk, (2 * cp_size - cp_rank) * chunk)
    return [position if position < total_length else None for position in owned]


def local_response(row: Row, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """`(storage position, response index)` of this rank's logits that predict a response token.

    The logits at token position p predict token p + 1, so response token t is predicted at prompt_length + t - 1.
    """
    found = []
    for storage, position in enumerate(chunk_positions(row.total_length, cp_rank, cp_size)):
        if position is not None and 0 <= (t := position + 1 - row.prompt_length) < row.response_length:
            found.append((storage, t))
    return found


def simulated_state(dp_size: int, cp_size: int, dp_rank: int = 0, cp_rank: int = 0) -> ParallelState:
    """One rank of a `dp_size x cp_size` world without process groups."""
    return ParallelState(
        intra_dp=GroupInfo(dp_rank, dp_size),
        intra_dp_cp=GroupInfo(dp_rank * cp_size + cp_rank, dp_size * cp_size),
        cp=GroupInfo(cp_rank, cp_size),
    )
