"""FSDP2: value, gradient and every metric are the float64 oracle's, however the step is split."""

import pytest

from miles.testing import FSDPBackend, Split, check_invariance, find_failures
from tests.fast.testing.changed_steps import alternate, emptying_splits, every_changed_step
from tests.fast.testing.steps import both_schedules, every_step, make_step

TERMS = {
    "KL": ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"],
    "unbiased KL": ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "low_var_kl", "--use-unbiased-kl"],
    "TIS": ["--use-tis", "--get-mismatch-metrics"],
    "entropy": ["--entropy-coef", "0.05"],
    "GSPO": ["--advantage-estimator", "gspo", "--normalize-advantages"],
    "dual clip": ["--eps-clip-c", "1.1"],
    "rollout log-probs": ["--use-rollout-logprobs"],
}


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_mode_and_loss(dp):
    check_invariance(every_step(), FSDPBackend(), both_schedules(dp=dp), shrink=False)


@pytest.mark.parametrize("dp", [1, 2])
def test_every_other_term(dp):
    steps = [make_step("prompt_mean", "policy", *options) for options in TERMS.values()]
    check_invariance(steps, FSDPBackend(), [Split(dp=dp, micro_batch_size=3)], shrink=False)


@pytest.mark.parametrize("dp", [1, 2])
def test_changed_masks_and_weights(dp):
    assert not find_failures(alternate(every_changed_step(), emptying_splits(dp=dp)), FSDPBackend())
