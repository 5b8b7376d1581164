"""NaN and infinity stop a run; at masked positions they are nobody's business."""

import math

import pytest
import torch

from miles.backends.training_utils.finite_checks import (
    NonFiniteError,
    refuse_non_finite_log_probs,
    refuse_non_finite_samples,
    refuse_non_finite_step,
)
from miles.utils.types import Sample


def _data(**columns):
    masks = [torch.tensor([1, 0]), torch.tensor([0, 1, 1])]
    lengths = {"response_lengths": [2, 3], "total_lengths": [4, 5]}
    return {"loss_masks": masks, "sample_indices": [7, 9], **lengths, **columns}


def test_log_probs_at_masked_positions_may_be_anything():
    rows = [torch.tensor([-1.0, math.nan]), torch.tensor([math.inf, -1.0, -2.0])]
    blank = {"loss_masks": [], "sample_indices": [], "log_probs": []}
    for data in (_data(log_probs=rows, ref_log_probs=rows), _data(), blank):
        assert refuse_non_finite_log_probs(0, data) is None


@pytest.mark.parametrize("column", ["log_probs", "ref_log_probs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probs_at_active_tokens(column, value):
    rows = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0, value])]
    with pytest.raises(NonFiniteError, match=rf"rollout 4: {column} of sample 9 is {value} at response token 2;"):
        refuse_non_finite_log_probs(4, _data(**{column: rows}))
    unnamed = _data(**{column: rows})
    del unnamed["sample_indices"]
    with pytest.raises(NonFiniteError, match="of sample 1 is"):
        refuse_non_finite_log_probs(4, unnamed)


@pytest.mark.parametrize("loss, grad_norm", [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_steps(loss, grad_norm):
    refuse_non_finite_step(0, 0, {"loss": -1.0}, 0.0)
    with pytest.raises(
        NonFiniteError, match=rf"rollout 2, step 1: loss {loss}, gradient norm {grad_norm}; .* not made"
    ):
        refuse_non_finite_step(2, 1, {"loss": loss}, grad_norm)


def test_samples_of_the_policy():
    good = Sample(index=3, rollout_log_probs=[-1.0, -2.0])
    refuse_non_finite_samples(0, [good, Sample(index=4)])
    with pytest.raises(NonFiniteError, match="rollout 1: sample 5 was sampled with log-probs that are not finite"):
        refuse_non_finite_samples(1, [good, Sample(index=5, rollout_log_probs=[-1.0, math.nan])])
