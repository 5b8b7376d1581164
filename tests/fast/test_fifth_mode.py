"""A fifth mode is one entry in the table of modes and one sentence in the oracle; whatever reads the table has it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from miles.backends.megatron_utils.availability import check_megatron
from miles.backends.training_utils.loss_aggregation import MODES, LossAggregation, RowTotals, StepCounts, one_for_zero
from miles.testing import FSDPBackend, MegatronBackend, Split, Step, averages, check_invariance, expected_outcome
from miles.tools.aggregation_report.__main__ import main as report
from miles.trainer import main as train
from miles.utils.arguments import build_parser, parse_args
from miles.utils.errors import UserError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.testing.steps import make_step
from tests.fast.tiny_runs import TINY, read_metrics
from tests.fast.tools.aggregation_report.small_dumps import GLOBAL_BATCH_SIZE, write_dumps

NAME = "root_mean"


def _denominators(totals: RowTotals) -> Tensor:
    """d_i = sqrt(m_i * max m), the maximum over all samples of the step."""
    return one_for_zero((totals.samples * totals.step_samples.max()).sqrt())


def _definition(step: Step, columns: Sequence[Tensor], weighing: averages.Weighing) -> Tensor:
    rollouts = averages.rollout_keys(step.rows)
    counted = dict.fromkeys(rollouts, 0.0)
    for key, row in zip(rollouts, weighing.counted, strict=True):
        counted[key] += sum(row)
    total = torch.zeros((), dtype=torch.float64)
    for i, key in enumerate(rollouts):
        for factor, value in zip(weighing.factors[i], columns[i], strict=True):
            if factor and counted[key]:
                total = total + factor * value / (counted[key] * max(counted.values())) ** 0.5
    return total / len(counted)


@pytest.fixture
def fifth_mode(monkeypatch):
    mode = LossAggregation(
        name=NAME,
        summary="token sum over the root of own and largest length",
        source="this test",
        formula="sqrt(m_i * max m)",
        denominators=_denominators,
        needs_step_samples=True,
    )
    monkeypatch.setitem(MODES, NAME, mode)
    monkeypatch.setitem(averages.DEFINITIONS, NAME, _definition)
    return mode


SPLITS = [
    Split(),
    Split(micro_batch_size=2),
    Split(dp=2, micro_batch_size=3),
    Split(dp=2, rows=[[2, 6, 1, 3, 4, 0, 5], []]),
]


def test_divisors_by_hand(fifth_mode):
    # Two samples of 1 and 4 tokens, max m = 4: d = sqrt(1 * 4) = 2 and sqrt(4 * 4) = 4.
    samples = torch.tensor([1, 4])
    totals = RowTotals(samples, None, StepCounts(2, 0, 5), step_samples=samples)
    assert fifth_mode.denominators(totals).tolist() == [2.0, 4.0]


def test_command_line_has_it(fifth_mode):
    assert parse_args(["--loss-aggregation", NAME]).loss_aggregation == NAME
    text = build_parser().format_help()
    assert NAME in text and fifth_mode.source in text
    with pytest.raises(UserError, match=f"Unknown --loss-aggregation mode 'nonesuch'.*{NAME}"):
        parse_args(["--loss-aggregation", "nonesuch"])
    with pytest.raises(UserError, match=f"sft_loss takes .* only; got {NAME}"):
        parse_args(["--loss-aggregation", NAME, "--loss-type", "sft_loss"])
    with pytest.raises(UserError, match=f"belongs to --loss-aggregation constant; got 8.0 with {NAME}"):
        parse_args(["--loss-aggregation", NAME, "--loss-aggregation-divisor", "8"])


@pytest.mark.parametrize("options", [(), ("--use-tis", "--tis-type", "icepop", "--tis-clip", "1.2")])
def test_fsdp2_under_every_split(fifth_mode, options):
    check_invariance(make_step(NAME, "policy", *options), FSDPBackend(), SPLITS, shrink=False)


def test_megatron_under_every_split(fifth_mode):
    try:
        check_megatron()
    except UserError as error:
        pytest.skip(str(error))
    splits = [*SPLITS, Split(cp=2, micro_batch_size=2), Split(pp=2, micro_batch_size=3)]
    check_invariance(make_step(NAME), MegatronBackend(), splits, shrink=False)


def test_it_is_another_mode_than_the_four(fifth_mode):
    outcomes = [make_step(NAME), *(make_step(mode) for mode in list(MODES)[:4])]
    values = [round(expected_outcome(step).value, 6) for step in outcomes]
    assert len(set(values)) == 5


def test_training_on_ragged_groups_uses_it(fifth_mode, tmp_path):
    values = {}
    for mode in (NAME, "prompt_mean"):
        options = ["--loss-aggregation", mode, "--prompt-groups", "ragged", "--aux-loss-aggregation", "match"]
        assert run_ranks(partial(train, [*TINY, *options, "--output-dir", str(tmp_path / mode)]), 1) == [0]
        values[mode] = [line["train/grad_norm"] for line in read_metrics(tmp_path / mode)]
    assert values[NAME] != values["prompt_mean"]


def test_report_and_figure_have_it(fifth_mode, tmp_path):
    paths = write_dumps(tmp_path)
    target = tmp_path / "report.json"
    options = ["--global-batch-size", str(GLOBAL_BATCH_SIZE), "--json", str(target), "--prompt-groups=ragged"]
    if find_spec("matplotlib"):
        options += ["--plot", str(tmp_path / "report.png")]
    assert report([*paths, *options]) == 0
    assert list(json.loads(target.read_text())["modes"]) == list(MODES)


def test_a_mode_that_is_not_in_the_table_raises_everywhere():
    with pytest.raises(ValueError, match="Unknown --loss-aggregation mode 'nonesuch'"):
        LossAggregation.of(Namespace(loss_aggregation="nonesuch"))
    with pytest.raises(ValueError, match="no definition of mode 'nonesuch'"):
        averages.aggregate(make_step(), [], "nonesuch", averages.plain_weighing([]))
