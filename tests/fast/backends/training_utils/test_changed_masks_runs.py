"""Whole runs with loss weights and rejection, some steps skipped: Megatron-Core has FSDP2's numbers on every axis."""

import pytest

from miles.backends.training_utils.backend import open_backend
from miles.backends.training_utils.parallel import get_parallel_state
from miles.training_loop import make_shard
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.backends.experimental.fsdp_utils.rollouts import (
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    make_args,
    make_samples,
    mode_options,
)

OPTIONS = [*mode_options("token_mean"), "--use-tis", "--tis-type", "geometric_rejection", "--tis-clip", "100"]
OPTIONS += ["--aux-loss-aggregation", "match", "--entropy-coef", "0.05"]


def _samples(rollout_id):
    """Two steps of 8 samples: of the first rollout's first, and the second's last, the correction leaves nothing."""
    samples = make_samples(rollout_id)
    for place, sample in enumerate(samples):
        sample.loss_weights = [0.25 + (place + 3 * token) % 5 for token in range(sample.response_length)]
        if place // 8 == rollout_id or place % 8 == 3:
            sample.rollout_log_probs = [-50.0] * sample.response_length
    return samples


def _train(actor):
    steps = []
    for rollout_id in (0, 1):
        dp = get_parallel_state().intra_dp
        steps += actor.train(rollout_id, make_shard(actor.args, _samples(rollout_id), dp, vocab_size=VOCAB_SIZE))
    return steps


def _train_on_fsdp():
    args = make_args("--num-layers", "4", *OPTIONS)
    with open_backend(args) as (world, make_actor):
        return _train(make_actor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=PAD_TOKEN_ID))


@pytest.fixture(scope="module")
def steps_on_fsdp():
    """The steps of one process."""
    return run_ranks(_train_on_fsdp, 1)[0]


def _assert_same(runs, expected):
    for steps in runs:
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_two_of_four_steps_are_skipped(steps_on_fsdp):
    assert [step.get("train/skipped_steps") for step in steps_on_fsdp] == [1, None, None, 2]
    assert [step["train/step"] for step in steps_on_fsdp] == [0, 1, 2, 3]
    assert all(abs(step["train/pg_loss"]) > 1e-3 for step in steps_on_fsdp[1:3])
    _assert_same(run_ranks(_train_on_fsdp, 2), steps_on_fsdp)


@pytest.mark.parametrize("layout", ["dp2", "pp2", "cp2", "vpp2"])
def test_megatron_skips_the_same_steps(layout, steps_on_fsdp):
    worlds = pytest.importorskip("tests.fast.backends.megatron_utils.worlds")
    world_size, options = worlds.LAYOUTS[layout]
    _assert_same(worlds.run_actors([*options, *OPTIONS], world_size, _train), steps_on_fsdp)
