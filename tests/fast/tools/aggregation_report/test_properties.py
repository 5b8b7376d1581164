"""What holds of any rollouts: shares are whole, switches chain, and the order of dumps and cuts changes nothing."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.debug_data import save_rollout_dump
from miles.tools.aggregation_report import weights as weights_module
from miles.tools.aggregation_report.dumps import read_dump
from miles.tools.aggregation_report.measures import token_range
from miles.tools.aggregation_report.report import describe
from miles.tools.aggregation_report.weights import SampleWeights, sample_weights
from miles.utils.types import Sample
from tests.fast.tools.aggregation_report.test_options import arguments


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    """Samples of up to three groups, some rollouts of two rows; the first sample has an active token."""
    samples = []
    for index in range(draw(st.integers(1, 9))):
        mask = draw(st.lists(st.integers(0, 1), min_size=0 if index else 1, max_size=12))
        weights = draw(st.sampled_from([None, 0.5, 3.0]))
        group, reward = draw(st.integers(0, 2)), draw(st.sampled_from([0.0, 1.0, -0.5]))
        rows = draw(st.sampled_from([1, 1, 2]))
        for _ in range(rows):
            samples.append(
                Sample(
                    **{"group_index": group, "rollout_id": index if rows > 1 else None, "reward": reward},
                    **{"tokens": [1] * (len(mask) + 1), "response_length": len(mask)},
                    loss_mask=mask if index else [1] * len(mask),
                    loss_weights=None if weights is None else [weights] * len(mask),
                )
            )
    return samples


def look(dumps: list[list[Sample]], *options: str, divisor: float = 7.0) -> tuple[SampleWeights, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [save_rollout_dump(f"{folder}/{{rollout_id}}.pt", i, samples) for i, samples in enumerate(dumps)]
        args = arguments(*map(str, paths), "--prompt-groups=ragged", *options)
        read = [read_dump(args, path, skip_bad=False) for path in paths]
        samples = sample_weights(args, read, divisor=divisor)
        return samples, describe(args, read, samples, divisor=divisor, top=2, right_above=0.0)


@settings(max_examples=40, deadline=None)
@given(samples=some_samples(), size=st.integers(1, 5))
def test_parts_make_up_the_whole(samples, size):
    weights, report = look([samples], f"--global-batch-size={size}")
    for mode in report["modes"].values():
        if mode["weight_of_a_step"]:
            assert sum(mode["share_by_quarter"]) == pytest.approx(1)
            assert sum(mode["share_by_reward"].values()) == pytest.approx(1)
            assert 1 - 1e-9 <= mode["effective_prompts"] <= report["groups"]["groups"] + 1e-9
            assert mode["effective_prompts"] <= mode["effective_samples"] + 1e-9
        found = mode["gradient_weight"]
        for quarter in found["quarters"]:
            assert quarter["right"]["sum"] + quarter["wrong"]["sum"] == pytest.approx(quarter["all"]["sum"])
        assert sum(abs(quarter["all"]["sum"]) for quarter in found["quarters"]) <= found["magnitude"] + 1e-9
    assert sum(quarter["samples"] for quarter in report["quarters"]) == report["data"]["samples"]
    assert (weights.num_active == 0).sum() == report["data"]["fully_masked_samples"]


@settings(max_examples=30, deadline=None)
@given(samples=some_samples())
def test_switches_chain(samples):
    _, report = look([samples])
    ratio = {(switch["from"], switch["to"]): switch["all"] for switch in report["switches"]}
    through = ratio["sample_mean", "prompt_mean"] * ratio["prompt_mean", "token_mean"]
    assert ratio["sample_mean", "token_mean"] == pytest.approx(through)


@settings(max_examples=20, deadline=None)
@given(one=some_samples(), other=some_samples())
def test_the_order_of_dumps_does_not_matter(one, other):
    first, second = (look(dumps)[1] for dumps in ([one, other], [other, one]))
    for mode, numbers in first["modes"].items():
        for key in ("share_by_quarter", "effective_samples", "effective_prompts"):
            assert second["modes"][mode][key] == pytest.approx(numbers[key])
        assert numbers["weight_of_a_step"] == pytest.approx(second["modes"][mode]["weight_of_a_step"])


def test_the_micro_batch_of_the_report_does_not_matter(monkeypatch):
    samples = [
        Sample(
            group_index=i // 3,
            tokens=[1] * (i + 2),
            response_length=i + 1,
            reward=i % 2,
            loss_weights=[i + 1.0] * (i + 1),
        )
        for i in range(9)
    ]
    whole, _ = look([samples], "--global-batch-size=4")
    monkeypatch.setattr(weights_module, "ROWS_AT_ONCE", 2)
    cut, _ = look([samples], "--global-batch-size=4")
    for mode in whole.weights:
        assert torch.allclose(whole.weights[mode], cut.weights[mode], rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.5, 1.0, 2.0, 4.0])), min_size=1, max_size=8))
def test_the_median_is_that_of_a_list_of_tokens(samples):
    tokens = sorted(weight for count, weight in samples for _ in range(count))
    counts, weights = (torch.tensor(column) for column in zip(*samples, strict=True))
    found = token_range(torch.where(counts > 0, weights.double(), torch.nan), counts)
    if not tokens:
        assert found == {"min": None, "median": None, "max": None}
        return
    middle = (tokens[(len(tokens) - 1) // 2] + tokens[len(tokens) // 2]) / 2
    assert found == {"min": tokens[0], "median": middle, "max": tokens[-1]}
