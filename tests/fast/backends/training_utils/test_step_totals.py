"""Corrections before the step: what they may depend on, and steps of which they leave nothing."""

import pytest
import torch

from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.training_loop import make_shard
from miles.utils.errors import RankError, UserError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks, run_ranks_to_errors
from tests.fast.backends.experimental.fsdp_utils.rollouts import VOCAB_SIZE, make_args, make_samples, mode_options
from tests.fast.backends.experimental.fsdp_utils.test_actor import _make_actor

HERE = __name__
REJECT_ALL = ["--use-tis", "--tis-type", "icepop", "--tis-clip-low", "900", "--tis-clip", "1000"]


def correction_options(function):
    return ["--use-tis", "--custom-tis-function-path", f"{HERE}.{function.__name__}"]


def _ratios(train_log_probs, rollout_log_probs):
    return [train - rollout for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True)]


def by_batch_median(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    ratios = _ratios(train_log_probs, rollout_log_probs)
    median = torch.cat(ratios).median()
    return pg_loss, [mask * (ratio <= median) for mask, ratio in zip(loss_masks, ratios, strict=True)], {}


def by_pg_loss(*, pg_loss, loss_masks, **_):
    parts = pg_loss.split([len(mask) for mask in loss_masks])
    return pg_loss, [mask * (part > 0.5) for mask, part in zip(loss_masks, parts, strict=True)], {}


def by_sign_of_late_pg_loss(*, pg_loss, loss_masks, **_):
    """Found out in the step alone: the constants of the rehearsals are not negative."""
    parts = pg_loss.split([len(mask) for mask in loss_masks])
    return pg_loss, [mask * (part >= 0) for mask, part in zip(loss_masks, parts, strict=True)], {}


def by_number_of_rows(*, pg_loss, loss_masks, **_):
    return pg_loss, [mask * (len(loss_masks) < 4) for mask in loss_masks], {}


def by_average_of_the_call(*, pg_loss, train_log_probs, loss_masks, **_):
    return pg_loss + torch.cat(train_log_probs).mean(), loss_masks, {}


def in_place(*, pg_loss, loss_masks, local_masks, **_):
    for mask in (*loss_masks, *local_masks):
        mask[1:] = 0
    return pg_loss, loss_masks, {}


def of_wrong_shape(*, pg_loss, loss_masks, **_):
    return pg_loss, [mask[:-1] for mask in loss_masks], {}


def without_rollout(*, pg_loss, rollout_log_probs, loss_masks, **_):
    assert rollout_log_probs is None
    keep = [torch.arange(len(mask)) % 2 == 0 for mask in loss_masks]
    return pg_loss, [mask * even for mask, even in zip(loss_masks, keep, strict=True)], {}


def _train(args, world, samples):
    actor = _make_actor(args, world)
    before = [parameter.full_tensor().clone() for parameter in actor.model.parameters()]
    steps = list(actor.train(0, make_shard(args, samples, world, vocab_size=VOCAB_SIZE)))
    after = [parameter.full_tensor() for parameter in actor.model.parameters()]
    moved = not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return steps, moved, actor.num_steps_done, len(actor.optimizer.state)


def _run(options, samples):
    def run():
        with fsdp_world() as world:
            return _train(make_args(*options), world, samples)

    return run


def test_a_correction_that_writes_into_its_masks_leaves_the_originals_alone():
    samples = make_samples(0)
    options = [*correction_options(in_place), *mode_options("token_mean"), "--rejected-tokens", "keep"]
    ((steps, _, _, _),) = run_ranks(_run(options, samples), 1)
    for step, rows in zip(steps, (samples[:8], samples[8:]), strict=True):
        assert step["train/num_tokens"] == step["train/num_counted_tokens"] == sum(sum(s.loss_mask) for s in rows)
        assert step["train/num_kept_tokens"] == sum(sample.loss_mask[0] for sample in rows)


def test_an_error_of_one_rank_says_so():
    (error,) = run_ranks_to_errors(_run(correction_options(by_sign_of_late_pg_loss), make_samples(0)), 1)
    assert isinstance(error, RankError)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (by_batch_median, r"by_batch_median must leave the same masks whatever rows .* of sample \d+ it keeps"),
        (by_pg_loss, r"by_pg_loss must leave the same masks .* not on the other rows, pg_loss or chance"),
        (of_wrong_shape, "one mask for each of .* rows, over its whole response or over its tokens on this rank"),
        (by_number_of_rows, "by_number_of_rows must leave the same masks"),
        (by_average_of_the_call, "by_average_of_the_call must change a token's loss alike .* of sample 0 it makes"),
    ],
)
def test_masks_that_depend_on_the_call_are_refused_before_the_step_on_every_rank(function, message, world_size):
    errors = run_ranks_to_errors(_run(correction_options(function), make_samples(0)), world_size)
    for error in errors:
        assert isinstance(error, UserError)
        with pytest.raises(UserError, match=message):
            raise error


def test_masks_that_depend_on_the_loss_itself_are_refused_in_the_step():
    (error,) = run_ranks_to_errors(_run(correction_options(by_sign_of_late_pg_loss), make_samples(0)), 1)
    with pytest.raises(UserError, match="by_sign_of_late_pg_loss must leave the same masks"):
        raise error


def test_the_first_sample_that_differs_is_named():
    """One prompt's two samples in a micro-batch each: the median of the step is not that of either."""
    samples = make_samples(0, num_prompts=1)
    for index, (sample, rollout) in enumerate(zip(samples, ([-1.0] * 4, [-9.0] * 4), strict=True)):
        sample.tokens, sample.response_length, sample.index = [1, 2, 3, 4, 5, 6], 4, 40 + index
        sample.loss_mask, sample.rollout_log_probs = [1, 1, 1, 1], rollout
    options = ["--rollout-batch-size", "1", "--num-steps-per-rollout", "1", "--micro-batch-size", "1"]
    (error,) = run_ranks_to_errors(_run([*options, *correction_options(by_batch_median)], samples), 1)
    assert "of sample 40 it keeps 4 tokens in the whole step and 2, or others, among fewer of them" in str(error)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_token_mean_step_left_empty_is_skipped_on_every_rank(world_size):
    options = [*mode_options("token_mean"), *REJECT_ALL]
    for steps, moved, num_steps_done, num_states in run_ranks(_run(options, make_samples(0)), world_size):
        assert [step["train/skipped_steps"] for step in steps] == [1, 2]
        assert [step["train/step"] for step in steps] == [0, 1]
        assert all("train/loss" not in step and "rollout/raw_reward" in step for step in steps)
        assert not moved and num_steps_done == 0 and num_states == 0
        for step in steps:
            assert (step["train/num_samples"], step["train/num_prompts"]) == (8, 4)
            left = ("num_kept_tokens", "num_counted_tokens", "effective_samples", "longest_quarter_weight")
            assert [step[f"train/{name}"] for name in left] == [0, 0, 0, 0]


def test_only_the_empty_step_is_skipped():
    samples = make_samples(0)
    for sample in samples[:8]:
        sample.rollout_log_probs = [-50.0] * sample.response_length  # the ratio is clamped at e^20
    options = [*mode_options("token_mean"), "--use-tis", "--tis-type", "geometric_rejection", "--tis-clip", "1000"]
    for steps, moved, num_steps_done, _ in run_ranks(_run(options, samples), 2):
        assert steps[0]["train/skipped_steps"] == 1 and steps[1]["train/grad_norm"] > 0
        assert [step["train/step"] for step in steps] == [0, 1]
        assert moved and num_steps_done == 1
        assert steps[1]["train/num_counted_tokens"] == steps[1]["train/num_tokens"] > 0


@pytest.mark.parametrize(
    ("mode", "more"),
    [("sample_mean", []), ("prompt_mean", []), ("constant", []), ("token_mean", ["--rejected-tokens", "keep"])],
)
def test_other_means_of_nothing_are_zero(mode, more):
    options = [*mode_options(mode), *REJECT_ALL, *more]
    for steps, _, num_steps_done, _ in run_ranks(_run(options, make_samples(0)), 2):
        assert [step["train/grad_norm"] for step in steps] == [0, 0]
        assert [step["train/pg_loss"] for step in steps] == [0, 0]
        assert [step["train/effective_samples"] for step in steps] == [0, 0]
        assert num_steps_done == 2


def test_a_custom_correction_does_without_rollout_log_probs():
    samples = make_samples(0)
    for sample in samples:
        sample.rollout_log_probs = None
    options = [*correction_options(without_rollout), *mode_options("token_mean"), "--num-steps-per-rollout", "1"]
    even = sum(sum(sample.loss_mask[::2]) for sample in samples)
    for steps, _, _, _ in run_ranks(_run(options, samples), 2):
        assert steps[0]["train/num_counted_tokens"] == even
        assert steps[0]["train/num_tokens"] == sum(sum(sample.loss_mask) for sample in samples)


def test_megatron_skips_on_every_stage_and_slice():
    worlds = pytest.importorskip("tests.fast.backends.megatron_utils.worlds")
    from miles.backends.training_utils.parallel import get_parallel_state

    def train(actor):
        shard = make_shard(actor.args, make_samples(0), get_parallel_state().intra_dp, vocab_size=VOCAB_SIZE)
        before = [parameter.clone() for chunk in actor.chunks for parameter in chunk.parameters()]
        steps = list(actor.train(0, shard))
        after = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return [step["train/skipped_steps"] for step in steps], same, actor.num_steps_done

    for layout in ("pp2", "cp2", "vpp2"):
        size, options = worlds.LAYOUTS[layout]
        options = [*options, *mode_options("token_mean"), *REJECT_ALL]
        assert worlds.run_actors(options, size, train) == [([1, 2], True, 0)] * size
