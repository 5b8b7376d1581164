"""TRL's trainer: the gradient and the logged loss of real steps are those of a float64 oracle over unsplit rows."""

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install 'miles[trl]'")

import torch

from miles.backends.training_utils.loss_aggregation import MODES
from tests.fast.integrations import trl_oracle
from tests.fast.integrations.trl_runs import run

RELATIVE = 2e-6
"""Of the norm of all gradients; a float32 model against a float64 one."""


def check_steps(ranks, folder, mode, **options):
    """Compare every training step; return how many tokens each step had, of each row."""
    training = [place for place, step in enumerate(ranks[0]["steps"]) if step["training"]]
    logged = [log["loss"] for log in ranks[0]["logs"] if "loss" in log]
    assert len(training) == len(ranks[0]["gradients"]) == len(logged)
    for number, place in enumerate(training):
        value, gradients = trl_oracle.expected(ranks, place, folder / "model", mode, **options)
        expected = torch.cat([gradients[name].flatten() for name in gradients])
        for rank in ranks:
            found = torch.cat([rank["gradients"][number][name].flatten() for name in gradients]).double()
            error = ((found - expected).norm() / expected.norm()).item()
            assert error < RELATIVE, f"step {number}: {error}"
        assert logged[number] == pytest.approx(value, rel=1e-5, abs=2e-6)


def options_of(mode):
    return {"loss_aggregation": mode, "loss_aggregation_divisor": 16.0 if mode == "constant" else None}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_accumulation(tmp_path, mode, accumulation):
    ranks = run(
        tmp_path,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        **options_of(mode),
    )
    check_steps(ranks, tmp_path, mode)
