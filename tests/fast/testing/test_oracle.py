"""The harness's float64 oracle: against exact fractions, and against numbers computed by hand."""

import random
import re
from argparse import Namespace
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from miles.testing import Row, Split, Step, expected_outcome
from miles.testing.averages import aggregate, main_weighing
from miles.testing.check import differences
from miles.testing.corrections import correct_row
from miles.testing.train_data import make_args
from tests.fast import oracle
from tests.fast.testing.changed_steps import (
    BOUNDS,
    changed_rows,
    changed_step,
    emptied_rows,
    emptied_steps,
    emptying_splits,
    skipped_step,
)
from tests.fast.testing.steps import DIVISOR, MODES, make_step


@pytest.mark.parametrize("normalization", ["weights", "tokens"])
@pytest.mark.parametrize("rejected_tokens", ["drop", "keep"])
@pytest.mark.parametrize("mode", MODES)
def test_the_four_sentences_are_those_of_the_exact_oracle(mode, rejected_tokens, normalization):
    step = make_step(mode, rows=changed_rows())
    draw = random.Random(3)
    kept = [[bit * draw.choice([0, 1, 1]) for bit in row.mask] for row in step.rows]
    kept[0] = [0] * len(kept[0])
    columns = [[Fraction(7 * i - t * t, 8) for t in range(row.response_length)] for i, row in enumerate(step.rows)]
    exact = [
        oracle.Row(
            row.mask,
            tuple(column),
            row.group,
            row.rollout,
            kept=tuple(kept_row),
            loss_weights=None if row.loss_weights is None else tuple(map(Fraction, row.loss_weights)),
        )
        for row, column, kept_row in zip(step.rows, columns, kept, strict=True)
    ]
    tensors = [torch.tensor([float(x) for x in column], dtype=torch.float64) for column in columns]
    wanted = float(oracle.value(exact, mode, DIVISOR, counting=oracle.Counting(rejected_tokens, normalization)))
    args = Namespace(rejected_tokens=rejected_tokens, loss_weight_normalization=normalization)
    got = aggregate(step, tensors, mode, main_weighing(args, step.rows, kept))
    assert got.item() == pytest.approx(wanted, rel=1e-13)


@pytest.mark.parametrize(
    ("rejected_tokens", "normalization", "expected"),
    [
        # One sample of two tokens with values 4 and 8 and weights 1/4 and 3/4, of which the second is rejected: the
        # sum is 1, and what is counted of the tokens is
        ("drop", "weights", 1 / 0.25),
        ("keep", "weights", 1 / (0.25 + 0.75)),
        ("drop", "tokens", 1 / 1),
        ("keep", "tokens", 1 / 2),
    ],
)
def test_what_is_counted_of_a_token_by_hand(rejected_tokens, normalization, expected):
    args = Namespace(rejected_tokens=rejected_tokens, loss_weight_normalization=normalization)
    step = Step([Row((1, 1), loss_weights=(0.25, 0.75))], divisor=2)
    weighing = main_weighing(args, step.rows, [[1, 0]])
    column = torch.tensor([4.0, 8.0], dtype=torch.float64)
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        assert aggregate(step, [column], mode, weighing).item() == expected
    assert aggregate(step, [column], "constant", weighing).item() == 1 / 2


@pytest.mark.parametrize(
    ("type_", "factors", "kept", "tis", "clipfrac"),
    [
        ("truncated", [1.5, 1, 1.5, 0.5], (1, 1, 0, 1), [2, 1, 4, 0.25], [1, 0, 1, 1]),
        ("icepop", [2, 1, 4, 0.25], [0, 1, 0, 0], [2, 1, 4, 0.25], [1, 0, 1, 1]),
        # The mean over active tokens of log r is (log 2 + log 1 + log 1/4) / 3 = log 2^(-1/3) = log 0.7937.
        ("geometric_rejection", [1] * 4, [1, 1, 0, 1], [0.5 ** (1 / 3)] * 4, [0] * 4),
    ],
)
def test_the_corrections_by_hand(type_, factors, kept, tis, clipfrac):
    args = Namespace(use_tis=True, get_mismatch_metrics=False, tis_type=type_, tis_clip=1.5, tis_clip_low=0.5)
    trained = torch.tensor([2.0, 1.0, 4.0, 0.25], dtype=torch.float64).log() - 3
    row = Row((1, 1, 0, 1), rollout_log_probs=(-3.0,) * 4)
    corrected = correct_row(args, None, row, trained)
    assert corrected.factors.tolist() == pytest.approx(factors)
    assert corrected.kept == kept
    assert corrected.metrics["tis"].tolist() == pytest.approx(tis)
    assert corrected.metrics["tis_abs"].tolist() == pytest.approx([abs(ratio - 1) for ratio in tis])
    assert corrected.metrics["tis_clipfrac"].tolist() == clipfrac
    alone = correct_row(Namespace(**vars(args) | {"use_tis": False, "get_mismatch_metrics": True}), None, row, trained)
    assert (alone.factors.tolist(), alone.kept, alone.metrics.keys()) == ([1] * 4, row.mask, corrected.metrics.keys())
    outside = Namespace(**vars(args) | {"tis_clip_low": 0.8})
    if type_ == "geometric_rejection":
        rejected = correct_row(outside, None, row, trained)
        assert (rejected.kept, rejected.metrics["tis_clipfrac"].tolist()) == ([0] * 4, [1] * 4)


def test_the_changed_steps_empty_what_they_are_meant_to():
    emptied = {}
    for type_ in ("icepop", "geometric_rejection"):
        args = make_args(changed_step("constant", "--use-tis", "--tis-type", type_, *BOUNDS), Split())
        rows = changed_rows()
        kept = [correct_row(args, None, row, torch.tensor(row.log_probs).double()).kept for row in rows]
        emptied[type_] = {place for place, mask in enumerate(kept) if not any(mask)}
        assert any(0 < sum(mask) < sum(row.mask) for mask, row in zip(kept, rows, strict=True)) == (type_ == "icepop")
    # A row (3) of a rollout whose other row stays, a whole rollout (7 and 8), its group, and split 1's last rank.
    assert emptied == {"icepop": {2, 3, 7, 8}, "geometric_rejection": {2, 3, 6, 7, 8}}
    assert set(emptying_splits(dp=2)[0].rows[-1]) <= emptied["icepop"]


def test_a_step_of_which_nothing_is_left_is_skipped():
    skipped = expected_outcome(skipped_step())
    assert not skipped.gradient
    # Nine rows in seven rollouts and four groups; of row 2 no token is active, of the others none is left.
    facts = {"num_samples": 7, "num_prompts": 4, "num_masked_samples": 1, "num_kept_tokens": 0}
    nothing = dict.fromkeys(["num_counted_tokens", "effective_samples", "longest_quarter_weight"], 0)
    tokens = {"num_tokens": sum(sum(row.mask) for row in emptied_rows())}
    said = {name: value for name, value in skipped.metrics.items() if not name.startswith("rollout/")}
    assert said == {"skipped_steps": 1, **tokens, **facts, **nothing}
    other = next(step for step in emptied_steps() if step.mode == "token_mean")
    assert expected_outcome(other).metrics["loss"] == 0.0
    (line,) = differences(skipped, replace(skipped, gradient=expected_outcome(other).gradient), rtol=1e-5)
    assert re.match("gradient: expected of 0 parameters, got ", line)


def test_what_samples_weigh_by_hand():
    """Samples of 2, 6, 1 and 0 active tokens, the last one of two rows; the second is the longest of four."""
    rows = [
        Row((1, 1), group=0),
        Row((1, 0, 1, 1, 1, 1, 1), group=0),
        Row((1,), group=1),
        Row((0, 0), group=1, rollout=5),
        Row((0,), group=1, rollout=5),
    ]
    # Weights: 1/4 for each that has tokens; (2, 6) / 16 and 1/2; (2, 6, 1) / 9.
    for mode, effective, longest in (
        ("sample_mean", 3.0, 1 / 3),
        ("prompt_mean", 1 / (1 / 64 + 9 / 64 + 1 / 4), 3 / 8),
        ("token_mean", 81 / (4 + 36 + 1), 6 / 9),
    ):
        metrics = expected_outcome(Step(rows, mode=mode)).metrics
        assert metrics["effective_samples"] == pytest.approx(effective)
        assert metrics["longest_quarter_weight"] == pytest.approx(longest)
        counts = [metrics[f"num_{name}"] for name in ("tokens", "samples", "prompts", "masked_samples")]
        assert counts == [9, 4, 2, 1] and metrics["num_kept_tokens"] == metrics["num_counted_tokens"] == 9


def test_the_oracle_on_one_token_by_hand():
    # One token, ratio e^0.5 = 1.6487 clipped to 1.2, advantage 2: the loss is -2.4, and the clip leaves no gradient.
    log_prob = expected_outcome(Step([Row((1,), advantage=2.0)], loss="sft")).value * -1
    clipped = expected_outcome(Step([Row((1,), advantage=2.0, log_probs=(log_prob - 0.5,))]))
    assert clipped.value == pytest.approx(-2.4)
    assert clipped.metrics["pg_clipfrac"] == 1.0
    assert clipped.metrics["ppo_kl"] == pytest.approx(-0.5)
    assert clipped.metrics["grad_norm"] == 0.0
    # With the advantage negative the ratio counts in full: 2 e^0.5, and the gradient is that of SFT times -2 e^0.5.
    punished = expected_outcome(Step([Row((1,), advantage=-2.0, log_probs=(log_prob - 0.5,))]))
    sft = expected_outcome(Step([Row((1,), advantage=2.0)], loss="sft"))
    assert punished.value == pytest.approx(2 * 2.718281828459045**0.5)
    for name, part in punished.gradient.items():
        assert torch.allclose(part, -punished.value * sft.gradient[name])
