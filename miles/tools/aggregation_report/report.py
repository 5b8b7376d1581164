"""The report as a JSON object: every number of it, from what samples weigh.

A number that does not exist (a share of nothing) or cannot be known is None; "unavailable" says why.
Shapes: N samples, P prompt groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, compress
from typing import Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation
from miles.backends.training_utils.loss_hub.math_utils import sum_by
from miles.backends.training_utils.step_weights import effective_number
from miles.ray.rollout.steps import LONGEST_QUARTER, NUM_QUARTERS
from miles.tools.aggregation_report.conversion import most_frequent
from miles.tools.aggregation_report.dumps import Dump
from miles.tools.aggregation_report.measures import (
    divide,
    group_sizes,
    has_one_reward,
    right_answers,
    token_range,
)
from miles.tools.aggregation_report.weights import SampleWeights
from miles.utils.options import Options

BY_PLACE = "rewards are normalized among those, and --n-samples-per-prompt says how many in a row do"

SETTINGS = (
    *("loss_aggregation_divisor", "n_samples_per_prompt", "global_batch_size", "prompt_groups"),
    "loss_weight_normalization",
    *("advantage_estimator", "rewards_normalization", "grpo_std_normalization", "normalize_advantages"),
    *("reward_key", "custom_reward_post_process_path"),
)
"""Options that the report repeats."""


def describe(
    args: Options,
    dumps: Sequence[Dump],
    samples: SampleWeights,
    *,
    divisor: float,
    top: int,
    right_above: float | None,
) -> dict[str, Any]:
    """Return the report.

    Args:
        args: From `options.training_args`.
        dumps: What was read; those of which a sample is left went into `samples`.
        samples: What it weighs.
        divisor: L of `constant`, in tokens.
        top: How many of the heaviest prompts to name.
        right_above: Raw reward above which an answer is right; None for the rule of `right_answers`.
    """
    is_right, rule = right_answers(samples.rewards, right_above)
    used = [dump for dump in dumps if dump.shard]
    return {
        "settings": {name: getattr(args, name) for name in SETTINGS}
        | {"constant_divisor": divisor, "right": rule, "top": top},
        **describe_files(dumps),
        "unavailable": _describe_unavailable(used, samples),
        "data": _describe_data(used, samples, is_right),
        "groups": _describe_groups(args, samples),
        "quarters": _describe_quarters(samples),
        "modes": {mode.name: _describe_mode(samples, mode, is_right, used, top) for mode in samples.weights},
        "switches": [_describe_switch(samples, old, new) for old, new in combinations(samples.weights, 2)],
    }


def describe_files(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Return what was read of each file, and what is wrong with each sample that was left out."""
    return {
        "dumps": [
            {
                "path": str(dump.path),
                "rows": len(dump.shard.get("tokens", ())),
                "steps": len(dump.shard.get("step_row_counts", ())),
                "skipped": len(dump.complaints),
            }
            for dump in dumps
        ],
        "skipped": [complaint for dump in dumps for complaint in dump.complaints],
    }


def _describe_unavailable(dumps: Sequence[Dump], samples: SampleWeights) -> dict[str, str]:
    """Return why figures are not there, by mode or part."""
    reasons = {mode.name: reason for mode, reason in samples.refusals.items()}
    without_group = next((dump.without_group for dump in dumps if dump.without_group), "")
    if samples.prompts is None:
        reasons["prompts"] = without_group
    if samples.advantages is None:
        reasons["gradient_weight"] = f"{without_group}; {BY_PLACE}"
    return reasons


def _describe_data(dumps: Sequence[Dump], samples: SampleWeights, is_right: Tensor) -> dict[str, Any]:
    return {
        "steps": int(samples.steps.max()) + 1,
        "samples": len(samples.lengths),
        "rows": sum(len(dump.shard["tokens"]) for dump in dumps),
        "rows_by_status": dict(sum((Counter(dump.statuses) for dump in dumps), Counter())),
        "response_tokens": int(samples.lengths.sum()),
        "active_tokens": int(samples.num_active.sum()),
        "fully_masked_samples": int((samples.num_active == 0).sum()),
        "right_samples": int(is_right.sum()),
        "wrong_samples": int((~is_right).sum()),
        "has_loss_weights": any("loss_weights" in dump.shard for dump in dumps),
    }


def _describe_groups(args: Options, samples: SampleWeights) -> dict[str, Any] | None:
    """Return counts of prompt groups: of all, of those of another size, and of those that teach nothing."""
    if samples.prompts is None or samples.centred_rewards is None:
        return None
    sizes = group_sizes(samples.prompts).tolist()
    size = args.n_samples_per_prompt or most_frequent(sizes)
    is_same = has_one_reward(samples.prompts, samples.centred_rewards).tolist()
    return {
        "groups": len(sizes),
        "size": size,
        "incomplete": sum(each < size for each in sizes),
        "larger": sum(each > size for each in sizes),
        "one_reward": sum(is_same),
        "samples_of_one_reward": sum(compress(sizes, is_same)),
    }


def _describe_quarters(samples: SampleWeights) -> list[dict[str, Any]]:
    members = [samples.quarters == quarter for quarter in range(NUM_QUARTERS)]
    return [
        {
            "samples": int(member.sum()),
            "shortest": int(samples.lengths[member].min()) if member.any() else None,
            "longest": int(samples.lengths[member].max()) if member.any() else None,
            "active_tokens": int(samples.num_active[member].sum()),
            "share_of_tokens": divide(samples.num_active[member].sum(), samples.num_active.sum()),
        }
        for member in members
    ]


def _describe_mode(
    samples: SampleWeights, mode: LossAggregation, is_right: Tensor, dumps: Sequence[Dump], top: int
) -> dict[str, Any]:
    weights, token_weights = samples.weights[mode], samples.token_weights[mode]
    total = weights.sum()
    reference = samples.token_weights.get(MODES["token_mean"])
    heaviest = effective_prompts = gradient_weight = None
    if samples.prompts is not None:
        by_prompt = sum_by(weights, samples.prompts, len(samples.group_indices))
        heaviest = _heaviest(samples, samples.prompts, by_prompt, dumps, top)
        effective_prompts = effective_number(by_prompt)
    if samples.advantages is not None:
        gradient_weight = _describe_gradient_weight(samples, weights * samples.advantages, is_right)
    return {
        "token_weight": token_range(token_weights, samples.num_active),
        "token_weight_over_token_mean": (
            None if reference is None else token_range(token_weights / reference, samples.num_active)
        ),
        "weight_of_a_step": divide(total, int(samples.steps.max()) + 1),
        "share_by_quarter": [divide(share, total) for share in sum_by(weights, samples.quarters, NUM_QUARTERS)],
        "share_by_reward": {
            "right": divide(weights[is_right].sum(), total),
            "wrong": divide(weights[~is_right].sum(), total),
        },
        "effective_samples": effective_number(weights),
        "effective_prompts": effective_prompts,
        "heaviest_prompts": heaviest,
        "gradient_weight": gradient_weight,
    }


def _heaviest(
    samples: SampleWeights, prompts: Tensor, by_prompt: Tensor, dumps: Sequence[Dump], top: int
) -> list[dict[str, Any]]:
    """Return the prompt groups with the largest shares, the heaviest first, the earlier of two equal ones first."""
    sizes = group_sizes(prompts)
    dump_of = torch.zeros_like(sizes).index_copy(0, prompts, samples.dumps)
    # To 12 digits of the whole, since sums over tokens that are equal on paper differ by rounding.
    shares = (by_prompt / by_prompt.sum()).nan_to_num().mul(1e12).round()
    order = shares.sort(descending=True, stable=True).indices.tolist()[:top]
    return [
        {
            "dump": str(dumps[int(dump_of[prompt])].path),
            "group_index": samples.group_indices[prompt],
            "samples": int(sizes[prompt]),
            "share": divide(by_prompt[prompt], by_prompt.sum()),
        }
        for prompt in order
    ]


def _describe_gradient_weight(samples: SampleWeights, gradient_weights: Tensor, is_right: Tensor) -> dict[str, Any]:
    """Return weight times advantage, summed over the right, the wrong and all answers of each quarter.

    "share" divides that sum by the sum of magnitudes over all samples; "per_token" is that sum over one active token,
    in multiples of the mean magnitude over all active tokens.
    """
    # A sample without response tokens has no advantage, and no weight either.
    gradient_weights = torch.where(samples.lengths > 0, gradient_weights, 0.0)
    magnitude = gradient_weights.abs().sum()

    def cell(member: Tensor) -> dict[str, float | None]:
        total, num_tokens = gradient_weights[member].sum(), samples.num_active[member].sum()
        per_token = divide(total * samples.num_active.sum(), num_tokens) if magnitude else None
        return {
            "sum": total.item(),
            "share": divide(total, magnitude),
            "per_token": None if per_token is None else divide(per_token, magnitude),
        }

    quarters = [
        {"right": cell(member & is_right), "wrong": cell(member & ~is_right), "all": cell(member)}
        for member in (samples.quarters == quarter for quarter in range(NUM_QUARTERS))
    ]
    difference = None
    if (samples.quarters == 0).any():
        shortest, longest = (
            gradient_weights[samples.quarters == quarter].sum().item() for quarter in (0, LONGEST_QUARTER)
        )
        difference = longest - shortest
    return {
        "magnitude": magnitude.item(),
        "quarters": quarters,
        "longest_minus_shortest": {
            "sum": difference,
            "share": None if difference is None else divide(difference, magnitude),
        },
    }


def _describe_switch(samples: SampleWeights, old: LossAggregation, new: LossAggregation) -> dict[str, Any]:
    """Return by what the mean weight of an active token is multiplied when `old` becomes `new`."""
    before, after = (sum_by(samples.weights[mode], samples.quarters, NUM_QUARTERS) for mode in (old, new))
    return {
        "from": old.name,
        "to": new.name,
        "all": divide(after.sum(), before.sum()),
        "by_quarter": [divide(*pair) for pair in zip(after, before, strict=True)],
    }
