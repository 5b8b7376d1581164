"""How much of an FSDP2 training step is loss aggregation. `python -m tests.benchmarks.bench_step`.

The built-in model on the CPU, policy loss, micro-batches of up to 8k tokens, rows as long as real answers. Aggregation
is all that is neither the model, nor log-probs and entropies, nor the optimizer: the step's counts and totals, what
its samples weigh, advantages, masks, the policy loss's terms over tokens and their reducers, forward and backward, and
the metrics. What it costs before the step (counts, advantages, the rollout's log) is in its share, and the old
policy's log-probs are in the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from miles.backends.experimental.fsdp_utils import actor as actor_room
from miles.backends.experimental.fsdp_utils.actor import FSDPTrainActor
from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.backends.training_utils import data, train_actor
from miles.backends.training_utils.loss_hub import losses
from miles.training_loop import make_shard
from miles.utils.arguments import parse_args
from tests.benchmarks.common import parser, positive, report
from tests.fast.length_mix import SAMPLES_PER_PROMPT, mixed_samples

VOCAB_SIZE = 4096
MAX_TOKENS = 8192

OF_THE_STEP = {
    "counts": (data, "get_step_counts"),
    "advantages": (train_actor, "compute_advantages_and_returns"),
    "totals of terms": (train_actor, "prepare_loss_terms"),
    "what samples weigh": (train_actor, "describe_steps"),
    "rollout log": (train_actor, "log_rollout_data"),
    "metrics": (actor_room, "aggregate_train_losses"),
}
"""What aggregation calls besides `loss_function`, and from where."""


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self.add(name, perf_counter() - start)

        return run

    def timed_loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Also time the backward pass from the loss to the log-probs."""

        def run(*args: Any, **keywords: Any) -> Any:
            start = perf_counter()
            self.started = None
            loss, *rest = function(*args, **keywords)
            loss.register_hook(self._start_backward)
            self.add("loss_function", perf_counter() - start)
            return loss, *rest

        return run

    def timed_scores(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Time log-probs and entropies, which are not aggregation, and note when their gradients are there."""

        def run(*args: Any, **keywords: Any) -> Any:
            start = perf_counter()
            scored = function(*args, **keywords)
            for row in scored["log_probs"]:
                if row.requires_grad:
                    row.register_hook(self._end_backward)
            self.add("log-probs in it", perf_counter() - start)
            return scored

        return run

    def _start_backward(self, gradient: torch.Tensor) -> None:
        self.started = perf_counter()

    def _end_backward(self, gradient: torch.Tensor) -> None:
        now = perf_counter()
        self.add("backward to log-probs", now - self.started)
        self.started = now  # the rows follow one another: together they add up to the time until the last


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Time everything while the block runs."""
    with ExitStack() as stack:
        for name, (room, function) in OF_THE_STEP.items():
            stack.enter_context(patch.object(room, function, clock.timed(name, getattr(room, function))))
        for room, name, wrap in (
            (actor_room, "loss_function", clock.timed_loss),
            (losses, "get_log_probs_and_entropy", clock.timed_scores),
        ):
            stack.enter_context(patch.object(room, name, wrap(getattr(room, name))))
        yield


def step(actor: FSDPTrainActor, args: Any, samples: list, rollout_id: int) -> dict[str, float]:
    """Make one optimizer step; return its seconds by part."""
    shard = make_shard(args, samples, data.get_parallel_state().intra_dp, vocab_size=VOCAB_SIZE)
    clock = Clock()
    with watched(clock):
        start = perf_counter()
        (_,) = actor.train(rollout_id, shard)
        total = perf_counter() - start
    seconds = clock.seconds
    forward = seconds.pop("loss_function") - seconds.pop("log-probs in it")
    return {"loss_function without log-probs": forward, **seconds, "whole step": total}


def rows_of(mode: str, num_samples: int, rounds: int) -> list[dict]:
    """Return the median seconds of each part, and their shares, after one step that is not counted."""
    samples = mixed_samples(num_samples)
    for sample in samples:
        sample.tokens = [token % VOCAB_SIZE for token in sample.tokens]
    args = parse_args(
        [
            *("--loss-aggregation", mode, "--num-rollout", "1", "--num-steps-per-rollout", "1"),
            *("--rollout-batch-size", str(num_samples // SAMPLES_PER_PROMPT)),
            *("--n-samples-per-prompt", str(SAMPLES_PER_PROMPT), "--max-position-embeddings", "2048"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(MAX_TOKENS)),
        ]
    )
    with fsdp_world() as world:
        actor = FSDPTrainActor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=0)
        turns = [step(actor, args, samples, rollout_id) for rollout_id in range(rounds + 1)][1:]
    median = {part: statistics.median(turn[part] for turn in turns) for part in turns[0]}
    whole = median.pop("whole step")
    parts = {**median, "aggregation": sum(median.values()), "whole step": whole}
    return [
        {"mode": mode, "part": part, "median ms": seconds * 1e3, "% of the step": 100 * seconds / whole}
        for part, seconds in parts.items()
    ]


def main() -> None:
    """Print the parts of a step under two modes."""
    options = parser(__doc__, rounds=3)
    help_text = f"samples of the step, a multiple of {SAMPLES_PER_PROMPT} (default: 64, 34k tokens)"
    options.add_argument("--samples", type=positive, default=64, help=help_text)
    args = options.parse_args()
    if args.samples % SAMPLES_PER_PROMPT:
        options.error(f"--samples must be a multiple of {SAMPLES_PER_PROMPT}, got {args.samples}")
    torch.set_num_threads(args.threads)
    tables = {f"{mode}": rows_of(mode, args.samples, args.rounds) for mode in ("sample_mean", "token_mean")}
    report(f"step of {args.samples} samples in micro-batches of up to {MAX_TOKENS} tokens", tables, args.json)


if __name__ == "__main__":
    main()
