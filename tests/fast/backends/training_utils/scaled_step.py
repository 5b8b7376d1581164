"""A step of any size: rows whose every number is a formula, and the definition over them in whole numbers.

Of row i and response token t: value x = ((7 i + 3 t) % 11 + i % 5 - 5) / 4; mask 0 at every tenth token, and for whole
rows now and then; a seventh of the tokens is rejected; weights are 1/2, 1 and 2. All are whole numbers over 4 and over
2, so sums over a row are exact in int64, and the oracle rounds a quotient at most.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from miles.backends.training_utils.loss_hub.pg_loss_reducer import PolicyReducers
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.utils.options import Options
from miles.utils.types import Sample
from tests.fast.backends.training_utils.layout import mode_namespace

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
DIVISOR = 8192.0
ROWS_PER_GROUP = 4
LINEAR_LOSS = "tests.fast.backends.training_utils.scaled_step.linear_loss"


def value4(row: int, t: Any) -> Any:
    """Four times the value."""
    return (7 * row + 3 * t) % 11 + row % 5 - 5


def active(row: int, t: Any) -> Any:
    """Whether the mask is 1."""
    return ((row + t) % 10 != 0) & (row % 97 != 5)


def rejected(row: int, t: Any) -> Any:
    """Whether the correction takes the token out, active or not."""
    return (3 * row + t) % 7 == 0


def weight2(row: int, t: Any) -> Any:
    """Twice the loss weight."""
    return 2 ** ((row + 2 * t) % 3)


def ragged_lengths(num_rows: int, longest: int) -> list[tuple[int, int]]:
    """(tokens, response tokens): from 16 to the longest, evenly in the logarithm, in no order; prompts of a fourth."""
    draw = np.random.default_rng(0)
    totals = np.exp(draw.uniform(math.log(16), math.log(longest), num_rows)).round().astype(int)
    totals[: min(2, num_rows)] = longest, 16
    return [(total, total - max(total // 4, 1)) for total in totals.tolist()]


def samples_of(lengths: Sequence[tuple[int, int]], *, is_weighted: bool) -> list[Sample]:
    """The rows as samples."""
    samples = []
    for row, (total, response) in enumerate(lengths):
        t = np.arange(response)
        samples.append(
            Sample(
                group_index=row // ROWS_PER_GROUP,
                index=row,
                tokens=[1] * total,
                response_length=response,
                reward=1.0,
                loss_mask=(active(row, t) * 1).tolist(),
                loss_weights=(weight2(row, t) / 2).tolist() if is_weighted else None,
                status=Sample.Status.COMPLETED,
            )
        )
    return samples


def arguments(mode: str, num_rows: int, *, max_tokens: int, is_rejecting: bool, loss_type: str) -> Namespace:
    """The namespace of a mode for one step of all rows, ranks evenly loaded."""
    args = mode_namespace(
        mode,
        DIVISOR if mode == "constant" else None,
        prompt_groups="ragged",
        global_batch_size=num_rows,
        n_samples_per_prompt=ROWS_PER_GROUP,
        balance_data=True,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=max_tokens,
        use_tis=is_rejecting,
        tis_clip_low=0.5,
        loss_type=loss_type,
        custom_loss_function_path=LINEAR_LOSS,
    )
    args.tis_type = "icepop"
    return args


def linear_loss(args, batch, logits, sum_of_sample_mean):
    """The logits are the values of this rank's response tokens; reduced as the policy-gradient term is."""
    responses = Responses(Options.of(args), batch)
    reducers = PolicyReducers.of(responses, batch.get("kept_masks", batch["loss_masks"]), sum_of_sample_mean)
    loss = reducers.pg(logits.reshape(-1))
    return loss, {"loss": loss.detach()}


def local_tokens(total: int, response: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Which response tokens a zigzag rank has, in its order: position p predicts token p + 1."""
    chunk = -(-total // (2 * cp_size))
    mirror = 2 * cp_size - 1 - cp_rank
    positions = torch.cat([torch.arange(index * chunk, (index + 1) * chunk) for index in (cp_rank, mirror)])
    t = positions[positions < total] + 1 - (total - response)
    return t[(t >= 0) & (t < response)]


@dataclass(frozen=True)
class Oracle:
    """Whole-number sums of each row: eight times those of k w x, twice those of k w, and the mask's."""

    value_sums8: np.ndarray
    counted2: np.ndarray
    mask_sums: np.ndarray

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], *, is_rejecting: bool, is_weighted: bool) -> Oracle:
        sums = []
        for row, (_, response) in enumerate(lengths):
            t = np.arange(response)
            mask = active(row, t)
            counted = mask * (weight2(row, t) if is_weighted else 2) * ~(rejected(row, t) & is_rejecting)
            sums.append(((counted * value4(row, t)).sum(), counted.sum(), mask.sum()))
        return cls(*np.array(sums, dtype=np.int64).T)

    def value(self, mode: str, *, of_ones: bool = False) -> float:
        """The step's value, or what it would be with every value 1: the sum of the gradient."""
        sums = (4 * self.counted2 if of_ones else self.value_sums8).tolist()
        counted = self.counted2.tolist()
        if mode == "token_mean":
            return sum(sums) / (4 * sum(counted))
        if mode == "constant":
            return sum(sums) / 8 / (DIVISOR * len(sums))
        size = ROWS_PER_GROUP if mode == "prompt_mean" else 1
        starts = range(0, len(sums), size)
        means = [sum(sums[i : i + size]) / (4 * max(sum(counted[i : i + size]), 1)) for i in starts]
        return math.fsum(means) / len(starts)

    def prompt_mean_facts(self, lengths: Sequence[tuple[int, int]]) -> dict[str, int | float]:
        """What is said of samples under `prompt_mean`, where one weighs its share of its group's counted tokens."""
        counted = self.counted2.tolist()
        weights = []
        for row, one in enumerate(counted):
            start = row - row % ROWS_PER_GROUP
            weights.append(one / max(sum(counted[start : start + ROWS_PER_GROUP]), 1))
        by_length = sorted(range(len(counted)), key=lambda row: lengths[row][1])
        longest = by_length[len(counted) * 3 // 4 :]
        return {
            "num_samples": len(counted),
            "num_prompts": -(-len(counted) // ROWS_PER_GROUP),
            "num_masked_samples": (self.mask_sums == 0).sum(),
            "effective_samples": math.fsum(weights) ** 2 / math.fsum(weight**2 for weight in weights),
            "longest_quarter_weight": math.fsum(weights[row] for row in longest) / math.fsum(weights),
        }
