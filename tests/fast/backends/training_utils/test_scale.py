"""Hundreds of ranks: sums are the oracle's, counts are exact past float32 and int32, payloads do not grow with tokens.

`python -m tests.benchmarks.scale` runs the same on 8,192 ranks.
"""

import pytest

from miles.backends.training_utils.loss_aggregation import StepCounts
from tests.fast.backends.training_utils.meetings import World
from tests.fast.backends.training_utils.scaled_run import Setting, run_huge_counts, run_step
from tests.fast.backends.training_utils.scaled_step import MODES, Oracle, ragged_lengths

ROUNDING = 4 * 2.0**-24
"""Of each number that is added up: the reducer's rounding to float32, and those of three operations after it."""


def run(dp_size, cp_size, num_rows, longest, *, changed, max_tokens=256):
    lengths = ragged_lengths(num_rows, longest)
    setting = Setting(World(dp_size, cp_size), lengths, max_tokens, is_rejecting=changed, is_weighted=changed)
    oracle = Oracle.of(lengths, is_rejecting=changed, is_weighted=changed)
    return run_step(setting), oracle, oracle.prompt_mean_facts(lengths)


@pytest.mark.parametrize("changed", [False, True], ids=["plain", "rejected and weighted"])
@pytest.mark.parametrize(("dp_size", "cp_size", "num_rows"), [(32, 4, 96), (8, 1, 5)])
def test_all_ranks_add_up_to_the_oracle_in_every_mode(dp_size, cp_size, num_rows, changed):
    """5 rows on 8 ranks leave three of them without any; 96 on 32 are three each."""
    result, oracle, facts = run(dp_size, cp_size, num_rows, 1024, changed=changed)
    assert result.counts == {StepCounts(num_rows, -(-num_rows // 4), int(oracle.mask_sums.sum()))}
    assert result.term_tokens == {oracle.counted2.sum() / 2}
    assert {name: result.facts[name] for name in facts} == pytest.approx(facts, rel=1e-12)
    assert result.num_microbatches > (num_rows > dp_size), "ranks of several rows cut them"
    for mode in MODES:
        budget = ROUNDING * result.sizes[mode]
        assert result.values[mode] == pytest.approx(oracle.value(mode), rel=0, abs=budget), mode
        assert result.metrics[mode] == pytest.approx(oracle.value(mode), rel=0, abs=budget), mode
        assert result.gradient_sums[mode] == pytest.approx(oracle.value(mode, of_ones=True), rel=ROUNDING), mode
        assert abs(result.gradient_products[mode] - oracle.value(mode)) <= ROUNDING * result.sizes[mode], mode


def test_what_ranks_bring_to_a_step_does_not_grow_with_tokens():
    """Kept masks alone do, which context-parallel ranks put together; `cp` is their axis."""
    few, many = (run(4, 2, 64, longest, changed=True, max_tokens=4096)[0] for longest in (256, 4096))
    (few_tokens,), (many_tokens,) = ({counts.num_tokens for counts in result.counts} for result in (few, many))
    assert many_tokens > 5 * few_tokens

    def without_masks(payload):
        return {collective: size for collective, size in payload.items() if not collective.startswith("schedule, cp")}

    assert without_masks(few.payload) == without_masks(many.payload)
    assert len(few.payload) == len(without_masks(few.payload)) + 1


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        (4097, 16_797_700),  # 4 rows x 1,025 tokens x 4,097 worlds, past 2^24 = 16,777,216
        (2**20 + 1, 4_299_165_700),  # past 2^32; float32 would make it 4,299,165,696
    ],
)
def test_counts_past_float32_and_int32(copies, expected):
    """Two ranks of two rows each, and so many worlds like theirs: counts go through the collective as int64."""
    counts, metrics, _ = run_huge_counts(World(2, 1, copies=copies), num_rows=2, length=1025)
    assert counts == {StepCounts(4 * copies, 0, expected)}
    assert metrics == {1.0}
