"""A step on DP 1,024 x CP 8, simulated rank by rank in one process. `python -m tests.benchmarks.scale`.

Every number is computed by the real functions and compared with whole-number sums over the unsplit step; the script
fails where one is further off than float32 rounding of what was added up. The defaults take several minutes.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from tests.benchmarks.common import parser, positive, report
from tests.fast.backends.training_utils.meetings import World
from tests.fast.backends.training_utils.scaled_run import Result, Setting, run_huge_counts, run_step
from tests.fast.backends.training_utils.scaled_step import MODES, Oracle, ragged_lengths

ROUNDING = 4 * 2.0**-24
"""Of each number that is added up: the reducer's rounding to float32, and those of three operations after it."""

HUGE_ROWS, HUGE_LENGTH = 16, 131_073
"""On 1,024 ranks they make 2,147,500,032 active tokens; 2^31 is 2,147,483,648."""

COLLECTIVES = {
    "schedule, dp 0": "micro-batches",
    "schedule, dp 1": "counts",
    "schedule, cp 0": "kept masks",
    "schedule, dp 2": "term totals",
    "facts, cp 0": "weights of rows",
    "facts, dp 0": "what samples weigh",
    "metrics, dp_cp 0": "each metric",
}
"""What the collectives of one rollout of one step carry, by axis and turn. Only rejection has masks to put together;
only rejection, weights and reducers with context have totals of their own; only context parallelism adds up rows."""

GROWTH = {
    "base": {},
    "samples x 4": {"num_rows": 1024},
    "tokens x 10": {"longest": 32_768},
    "DP ranks x 4": {"dp_size": 64},
    "CP ranks x 4": {"cp_size": 8},
    "tokens a micro-batch / 8": {"max_tokens": 256},
}
"""What differs from the base of 256 samples of up to 2,048 tokens on DP 16 x CP 2."""


def exactness_rows(result: Result, oracle: Oracle, **fields: Any) -> list[dict]:
    """Compare with the oracle; errors are shares of what rounding allows."""
    rows = []
    for mode in MODES:
        expected, budget = oracle.value(mode), ROUNDING * result.sizes[mode]
        gradient = oracle.value(mode, of_ones=True)
        errors = {
            "error / rounding": abs(result.values[mode] - expected) / budget,
            "metric's": abs(result.metrics[mode] - expected) / budget,
            "gradient's": abs(result.gradient_sums[mode] - gradient) / (ROUNDING * gradient),
            "gradient's by token": abs(result.gradient_products[mode] - expected) / budget,
        }
        assert max(errors.values()) <= 1, (mode, errors)
        value = {"value": f"{result.values[mode]:.9g}", "oracle": f"{expected:.9g}"}
        rows.append({**fields, "mode": mode, **value, **errors})
    return rows


def run(dp_size: int, cp_size: int, num_rows: int, longest: int, *, max_tokens: int, changed: bool) -> tuple:
    """Run one step and check its counts; return the result, the oracle and what the tables call the run."""
    lengths = ragged_lengths(num_rows, longest)
    setting = Setting(World(dp_size, cp_size), lengths, max_tokens, is_rejecting=changed, is_weighted=changed)
    result = run_step(setting, note=lambda text: print(f"  {text}", flush=True))
    oracle = Oracle.of(lengths, is_rejecting=changed, is_weighted=changed)
    (counts,), (term_tokens,) = result.counts, result.term_tokens
    assert (counts.num_samples, counts.num_prompts) == (num_rows, -(-num_rows // 4))
    assert counts.num_tokens == int(oracle.mask_sums.sum()) and term_tokens == oracle.counted2.sum() / 2
    for fact, expected in oracle.prompt_mean_facts(lengths).items():
        assert abs(result.facts[fact] - expected) <= 1e-12 * expected, fact
    name = "rejected and weighted" if changed else "plain"
    return result, oracle, {"step": name, "active tokens": counts.num_tokens, "counted": term_tokens}


def payload_rows(name: str, payload: dict[str, int]) -> list[dict]:
    """Return what a rank brings to each collective."""
    return [{"run": name, "carries": COLLECTIVES[key], "bytes": size} for key, size in payload.items()]


def growth_rows() -> list[dict]:
    """Change one size at a time; bytes are what a rank brings to a collective."""
    rows = []
    for name, change in GROWTH.items():
        print(name, flush=True)
        shape = {"dp_size": 16, "cp_size": 2, "num_rows": 256, "longest": 2048, "max_tokens": 2048, **change}
        result, _, fields = run(**shape, changed=True)
        num_ranks = shape["dp_size"] * shape["cp_size"]
        by_name = {f"{COLLECTIVES[key]}, B": size for key, size in result.payload.items()}
        num_losses = num_ranks * result.num_microbatches * len(MODES)
        milliseconds = 1e3 * result.seconds["losses, four modes"] / num_losses
        sizes = {"active tokens": fields["active tokens"], "micro-batches": result.num_microbatches}
        rows.append({"": name, **sizes, **by_name, "loss of a micro-batch, ms": milliseconds})
    return rows


def huge_rows(num_ranks: int) -> list[dict]:
    """Count more than 2^31 tokens (on 1,024 ranks) and divide by them."""
    start = perf_counter()
    (counts,), (metric,), payload = run_huge_counts(World(num_ranks, 1), num_rows=HUGE_ROWS, length=HUGE_LENGTH)
    expected = num_ranks * HUGE_ROWS * HUGE_LENGTH
    assert counts.num_tokens == expected and metric == 1.0
    return [
        {
            "ranks": num_ranks,
            "active tokens": counts.num_tokens,
            "over 2^31": counts.num_tokens > 2**31,
            "mean of ones": metric,
            "bytes of counts": payload["schedule, dp 0"],
            "s": perf_counter() - start,
        }
    ]


def main() -> None:
    """Run the step plain and with rejection and weights, smaller ones of other sizes, and the huge counts."""
    options = parser(__doc__)
    for name, default in (("dp", 1024), ("cp", 8), ("samples", 16_384), ("longest", 32_768), ("max-tokens", 16_384)):
        options.add_argument(f"--{name}", type=positive, default=default, help=f"default: {default}")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    exactness, seconds, payload = [], [], []
    for changed in (False, True):
        print(f"DP {args.dp} x CP {args.cp}, {'rejected and weighted' if changed else 'plain'}", flush=True)
        shape = (args.dp, args.cp, args.samples, args.longest)
        result, oracle, fields = run(*shape, max_tokens=args.max_tokens, changed=changed)
        exactness += exactness_rows(result, oracle, **fields)
        seconds += [{"step": fields["step"], "stage": stage, "s": value} for stage, value in result.seconds.items()]
        payload += payload_rows(f"{fields['step']}, {fields['active tokens']} tokens", result.payload)
    tables = {
        "exactness": exactness,
        "what a rank brings to each collective of a step": payload,
        "what grows with what, rejected and weighted": growth_rows(),
        "counts past 2^31": huge_rows(args.dp),
        "time of all ranks in one process": seconds,
    }
    report("scale", tables, args.json)


if __name__ == "__main__":
    main()
