"""From samples to micro-batches: 16,384 samples of up to 8k tokens. `python -m tests.benchmarks.bench_data_path`.

The stages are the package's; lengths are those of real answers, stretched and repeated. What a stage did before, one
look at each number through numpy and a copy of each list, is restated here and runs beside it.
"""

from __future__ import annotations

import io
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from miles.backends.training_utils.data import get_data_iterator, move_to_device
from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
from miles.ray.rollout.row_checks import check_tokens, checked_log_probs, checked_loss_mask
from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    process_rollout_data_shard,
    split_train_data_by_dp,
    validate_train_data,
)
from miles.rollout.plain_dump import load_plain
from miles.training_loop import check_rows_fit_model
from miles.utils.number_lists import flat_tensor, smallest_and_largest
from miles.utils.seqlen_balancing import get_seqlen_balanced_partitions, pack_by_token_budget
from miles.utils.types import Sample
from tests.benchmarks.common import Stages, interleaved, parser, positive, report, time_rows
from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.length_mix import LARGEST_TOKEN, SAMPLES_PER_PROMPT, length_mix, mixed_samples

NUM_RANKS = 64
MAX_TOKENS = 16_384
STEP_UNIT = NUM_RANKS * SAMPLES_PER_PROMPT
"""Prompt groups stay whole, and every rank gets equally many."""


def seconds_of_stages(args: Namespace, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the CPU seconds of each stage, which a busy machine disturbs less; the last two are of one rank."""
    stages = Stages()
    data = stages.run("conversion", lambda: convert_samples_to_train_data(args, samples, {}, None, None))
    stages.run("validation", lambda: validate_train_data(args, data, dp_size=NUM_RANKS))
    stages.run("fit to the model", lambda: check_rows_fit_model(args, data["tokens"], vocab_size=LARGEST_TOKEN))
    shards = stages.run("split and balance", lambda: split_train_data_by_dp(args, data, NUM_RANKS))
    shard = process_rollout_data_shard(args, shards[0])
    batch = stages.run("one rank's tensors", lambda: move_to_device(shard, "cpu"))
    stages.run("one rank's schedule", lambda: get_data_iterator(args, None, batch))
    stages.seconds["total"] = sum(stages.seconds.values())
    return stages.seconds


def arguments(samples: Sequence[Sample]) -> Namespace:
    """Return a namespace under which the samples are one step."""
    args = mode_namespace(
        "prompt_mean",
        n_samples_per_prompt=SAMPLES_PER_PROMPT,
        global_batch_size=len(samples),
        balance_data=True,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=MAX_TOKENS,
    )
    args.max_position_embeddings = max(len(sample.tokens) for sample in samples)
    return args


def stage_rows(sizes: dict[str, Sequence[Sample]], rounds: int) -> list[dict]:
    """Return the median CPU seconds of each stage for samples of several sizes, which take turns."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sizes}
    for _ in range(rounds):
        for name, samples in sizes.items():
            turns[name].append(seconds_of_stages(arguments(samples), samples))
    names = next(iter(turns.values()))[0]
    return [
        {"stage": stage} | {f"{name}, s": float(np.median([turn[stage] for turn in turns[name]])) for name in sizes}
        for stage in names
    ]


def checks_before(samples: Sequence[Sample]) -> None:
    """Look at each number through numpy, and copy masks and log-probs."""
    for sample in samples:
        assert np.asarray(sample.tokens).dtype.kind in "iu"
        mask = np.asarray(sample.loss_mask)
        assert not ((mask != 0) & (mask != 1)).any()
        mask = mask.astype(np.int64).tolist()
        values = np.asarray(sample.rollout_log_probs).astype(np.float64)
        assert not (~(np.abs(values) <= np.finfo(np.float32).max) & np.asarray(mask, dtype=bool)).any()
        values.tolist()
        assert min(sample.tokens) >= 0 and max(sample.tokens) < LARGEST_TOKEN


def checks(samples: Sequence[Sample]) -> None:
    """Do the same through the package's checks."""
    for sample in samples:
        check_tokens("sample", sample.tokens, sample.response_length)
        mask = checked_loss_mask("sample", sample.loss_mask, sample.response_length)
        checked_log_probs("sample", sample.rollout_log_probs, mask)
        smallest_and_largest(sample.tokens)


def tensors_before(samples: Sequence[Sample]) -> None:
    """Put all numbers in one list first."""
    torch.tensor([value for sample in samples for value in sample.tokens], dtype=torch.int64)
    torch.tensor([value for sample in samples for value in sample.rollout_log_probs], dtype=torch.float32)


def tensors(samples: Sequence[Sample]) -> None:
    """Do the same through the package."""
    flat_tensor([sample.tokens for sample in samples], torch.int64)
    flat_tensor([sample.rollout_log_probs for sample in samples], torch.float32)


def comparison_rows(samples: Sequence[Sample], rounds: int) -> list[dict]:
    """Time what was changed against what it was, on fewer samples: the dump's old reader needs a minute for all."""
    dump = io.BytesIO()
    torch.save({"rollout_id": 0, "samples": [sample.to_dict() for sample in samples]}, dump)

    def read(load: Callable[[io.BytesIO], Any]) -> None:
        dump.seek(0)
        load(dump)

    pairs = {
        "checks of rows": (lambda: checks(samples), lambda: checks_before(samples)),
        "lists to tensors": (lambda: tensors(samples), lambda: tensors_before(samples)),
        "reading a dump": (
            lambda: read(load_plain),
            lambda: read(lambda file: torch.load(file, weights_only=True)),
        ),
    }
    rows = []
    for name, (ours, before) in pairs.items():
        competitors = {"ours": ours, "before": before}
        rows += time_rows(interleaved(competitors, rounds), ours="ours", part=name, samples=len(samples))
    return rows


def schedule_rows(rounds: int) -> list[dict]:
    """Time balancing and packing as samples grow, and say how even the ranks are."""
    rows = []
    for num_samples in (16_384, 65_536, 262_144):
        lengths = [total for total, _ in length_mix(num_samples, longest=8192)]
        parts = get_seqlen_balanced_partitions(lengths, NUM_RANKS)
        loads = [sum(lengths[i] for i in part) for part in parts]
        functions = {
            "balance": lambda lengths=lengths: get_seqlen_balanced_partitions(lengths, NUM_RANKS),
            "pack": lambda lengths=lengths: pack_by_token_budget(lengths, MAX_TOKENS),
        }
        seconds = {name: float(np.median(turns)) for name, turns in interleaved(functions, rounds).items()}
        rows.append(
            {
                "samples": num_samples,
                "ranks": NUM_RANKS,
                "max/mean tokens": f"{max(loads) * NUM_RANKS / sum(loads):.5f}",
                "balance s": seconds["balance"],
                "pack s": seconds["pack"],
                "balance ns/(n log2 n)": seconds["balance"] * 1e9 / (num_samples * math.log2(num_samples)),
                "pack ns/(n log2 n)": seconds["pack"] * 1e9 / (num_samples * math.log2(num_samples)),
            }
        )
    return rows


def main() -> None:
    """Print the stages, what changed, and the growth of balancing and packing."""
    options = parser(__doc__, rounds=3)
    help_text = f"samples of the stages, a multiple of {4 * STEP_UNIT} (default: 16384)"
    options.add_argument("--samples", type=positive, default=16_384, help=help_text)
    options.add_argument("--longest", type=positive, default=8192, help="tokens of the longest sample (default: 8192)")
    args = options.parse_args()
    if args.samples % (4 * STEP_UNIT):
        options.error(f"--samples must be a multiple of {4 * STEP_UNIT}, got {args.samples}")
    torch.set_num_threads(args.threads)
    set_parallel_state(ParallelState())
    samples = mixed_samples(args.samples, longest=args.longest)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    sizes = {
        "all": samples,
        "a quarter of the samples": samples[: args.samples // 4],
        "a quarter of the length": mixed_samples(args.samples, longest=max(args.longest // 4, 1)),
    }
    tables = {
        f"stages, {args.samples} samples, {num_tokens / 1e6:.1f}M tokens, CPU seconds": stage_rows(sizes, args.rounds),
        "what changed": comparison_rows(samples[: args.samples // 16], args.rounds),
        f"balance over {NUM_RANKS} ranks, pack into {MAX_TOKENS} tokens": schedule_rows(args.rounds),
    }
    report("data path", tables, args.json)


if __name__ == "__main__":
    main()
