"""Property: whatever the rows, masks, groups, rollouts and split, the step's value, gradient and metrics
are those of the unsplit fractions oracle."""

from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from tests.fast import oracle
from tests.fast.backends.training_utils import harness, layout
from tests.fast.oracle import Row

PROPERTY = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TOLERANCE = 3e-6  # float32 sums of up to sixty dyadic terms, each at most 8


@st.composite
def steps(draw, max_parts=3):
    """Rows of one step in random order, in ragged groups; short rows have high values and long ones low.

    Rollouts have one to `max_parts` rows (0: no row names a rollout; one of a single row may leave it unnamed). At
    times a response is empty, or a row or a group has no active token.
    """
    rows, rollout = [], 0
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 2))):
            parts = draw(st.integers(1, max(max_parts, 1)))
            named = max_parts and (parts > 1 or draw(st.booleans()))
            for _ in range(parts):
                length = draw(st.integers(0, 6))
                mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
                values = draw(st.lists(st.integers(-32, 32), min_size=length, max_size=length))
                unit = Fraction(1, 4 if length < 3 else 32)
                rows.append(
                    Row(
                        tuple(mask),
                        tuple(x * unit for x in values),
                        group=10 * group + 3,
                        rollout=rollout if named else None,
                        prompt_length=draw(st.integers(1, 4)),
                    )
                )
            rollout += 1
    return draw(st.permutations(rows))


@st.composite
def cuts(draw, num_rows):
    """Rows in random order onto one to three ranks and one to three micro-batches each; some get none."""
    dp_size, num_microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cut = [[[] for _ in range(num_microbatches)] for _ in range(dp_size)]
    for row in draw(st.permutations(range(num_rows))):
        cut[draw(st.integers(0, dp_size - 1))][draw(st.integers(0, num_microbatches - 1))].append(row)
    return cut


def flat(nested):
    return [float(x) for row in nested for x in row]


def assert_same(outcome, rows, mode, divisor, metric="loss"):
    expected = float(oracle.value(rows, mode, divisor))
    assert outcome.value == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    assert outcome.metrics[metric] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    weights = flat(oracle.weights(rows, mode, divisor))
    assert flat(outcome.gradient) == pytest.approx(weights, rel=TOLERANCE, abs=1e-7)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("backend", harness.BACKENDS)
@pytest.mark.parametrize("mode", oracle.MODES)
@PROPERTY
@given(data=st.data())
def test_any_cut_gives_the_oracle(mode, backend, cp_size, data):
    rows = data.draw(steps(max_parts=data.draw(st.sampled_from([0, 1, 3]))))
    assume(mode != "token_mean" or oracle.num_tokens(rows))
    divisor = data.draw(st.sampled_from([1.0, 8.0, 2.5])) if mode == "constant" else None
    args = layout.mode_namespace(mode, divisor, **layout.batch_sizes(rows), **harness.LINEAR)
    engine = harness.Engine(args, rows, backend, cp_size)
    for _ in range(2):
        assert_same(engine.run(data.draw(cuts(len(rows)))), rows, mode, divisor)


@pytest.mark.parametrize("mode", oracle.MODES)
@PROPERTY
@given(data=st.data())
def test_policy_metrics_keep_their_own_normalizers(mode, data):
    """pg_loss follows the mode; ppo_kl stays the mean over samples. Old log-probs differ by a token's own amount."""
    rows = data.draw(steps(max_parts=data.draw(st.sampled_from([0, 3]))))
    assume(mode != "token_mean" or oracle.num_tokens(rows))
    args = layout.mode_namespace(mode, **layout.batch_sizes(rows), eps_clip=10.0, eps_clip_high=10.0)
    shift = [[Fraction((3 * i + 5 * t) % 7 - 3, 64) for t in range(row.response_length)] for i, row in enumerate(rows)]
    engine = harness.Engine(args, rows)

    def shifted(batch):
        for i, old in zip(batch["row_ids"], batch["log_probs"], strict=True):
            old += torch.tensor([float(s) for s in shift[i]])

    engine.change_batch = shifted
    outcome = engine.run(data.draw(cuts(len(rows))))
    assert outcome.metrics["ppo_kl"] == pytest.approx(float(oracle.value(rows, "sample_mean", column=shift)), abs=1e-6)
    ratio = [[torch.exp(torch.tensor(-float(s), dtype=torch.float64)).item() for s in row] for row in shift]
    pg = [[Fraction(r) * x for r, x in zip(rs, row.values, strict=True)] for rs, row in zip(ratio, rows, strict=True)]
    expected = float(oracle.value(rows, mode, args.loss_aggregation_divisor, column=pg))
    assert outcome.metrics["pg_loss"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert outcome.value == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ---- sample_mean is the legacy formula ----------------------------------------------------------------------------


def legacy_sum_of_sample_means(xs, masks):
    """The formula that hosts have always run, in the precision they run it in."""
    total = torch.zeros(())
    for x, mask in zip(xs, masks, strict=True):
        total = total + (x * mask).sum() / torch.clamp_min(mask.sum(), 1)
    return total


def legacy_and_reducer(xs, masks):
    total_lengths, response_lengths = [len(m) + 2 for m in masks], [len(m) for m in masks]
    reducer = get_sum_of_sample_mean(total_lengths, response_lengths, masks)
    return reducer(torch.cat(xs)), legacy_sum_of_sample_means(xs, masks)


@PROPERTY
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 4, 8]), st.integers(0, 5), st.randoms(use_true_random=False)),
        min_size=1,
        max_size=6,
    )
)
def test_sample_mean_is_the_legacy_loop_bit_for_bit_where_sums_are_exact(shapes):
    """Small integers over 1, 2, 4 or 8 active tokens: every quotient and partial sum is a binary fraction."""
    xs, masks = [], []
    for active, idle, random in shapes:
        mask = [1] * active + [0] * max(idle, 1 - active)
        random.shuffle(mask)
        masks.append(torch.tensor(mask))
        xs.append(torch.tensor([float(random.randint(-99, 99)) for _ in mask]))
    result, legacy = legacy_and_reducer(xs, masks)
    assert result.dtype == legacy.dtype and torch.equal(result, legacy)


@PROPERTY
@given(rows=steps(max_parts=0))
def test_sample_mean_is_the_legacy_loop_to_1e_6(rows):
    masks = [torch.tensor(row.mask) for row in rows]
    result, legacy = legacy_and_reducer([torch.tensor([float(x) / 3 for x in row.values]) for row in rows], masks)
    assert result.item() == pytest.approx(legacy.item(), rel=1e-6, abs=1e-6)
