"""The FSDP2 actor: the same training however the rollout is cut, and nothing that is not finite gets through."""

import math

import pytest
import torch

from miles.backends.experimental.fsdp_utils import actor as actor_module
from miles.backends.experimental.fsdp_utils.actor import FSDPTrainActor
from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.backends.training_utils.finite_checks import NonFiniteError
from miles.backends.training_utils.train_actor import build_seeded_gpt, needs_old_log_probs
from miles.training_loop import make_shard
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks, run_ranks_to_errors
from tests.fast.backends.experimental.fsdp_utils.rollouts import (
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    make_args,
    make_samples,
    mode_options,
)

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")


def _make_actor(args, world):
    return FSDPTrainActor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=PAD_TOKEN_ID)


def _train(args, world, samples_by_rollout):
    """Return the metrics of every step and the weights after the last."""
    actor = _make_actor(args, world)
    steps = []
    for rollout_id, samples in enumerate(samples_by_rollout):
        shard = make_shard(args, samples, world, vocab_size=VOCAB_SIZE)
        steps.extend(actor.train(rollout_id, shard))
    weights = torch.cat([parameter.full_tensor().flatten() for parameter in actor.model.parameters()])
    return steps, weights.tolist()


def _train_all(settings, samples_by_rollout):
    """Train one fresh actor for each setting, all in one process group."""

    def run():
        with fsdp_world() as world:
            return {name: _train(make_args(*options), world, samples_by_rollout) for name, options in settings.items()}

    return run


def _assert_same_training(actual, expected, what):
    (actual_steps, actual_weights), (expected_steps, expected_weights) = actual, expected
    for step, (ours, theirs) in enumerate(zip(actual_steps, expected_steps, strict=True)):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), (what, step, key)
    assert actual_weights == pytest.approx(expected_weights, abs=1e-5), what


def test_training_does_not_depend_on_processes_and_micro_batches_in_any_mode():
    # One step's value, gradient and metrics are the harness's (tests/fast/testing); this is about what comes after.
    samples = [make_samples(0), make_samples(1)]
    whole = {mode: [*mode_options(mode), "--micro-batch-size", "3"] for mode in MODES}
    packed = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "24", "--balance-data"]
    one = run_ranks(_train_all(whole, samples), 1)[0]
    for results in run_ranks(_train_all({mode: [*mode_options(mode), *packed] for mode in MODES}, samples), 2):
        for mode in MODES:
            _assert_same_training(results[mode], one[mode], mode)
    first_norms = [one[mode][0][0]["train/grad_norm"] for mode in MODES]
    assert min(first_norms) > 1e-2
    assert len({round(norm, 3) for norm in first_norms}) == len(MODES)


@pytest.mark.parametrize("limit", [0.0, 0.25])
def test_gradients_are_clipped_by_the_norm_of_the_whole(limit):
    def run():
        with fsdp_world() as world:
            actor = _make_actor(make_args("--clip-grad", str(limit)), world)
            tokens = torch.arange(4)[None]
            actor.model(tokens, tokens, torch.tensor([0, 4], dtype=torch.int32), 4).square().sum().backward()
            norm = actor._clip_gradients()
            gradients = [parameter.grad.full_tensor() for parameter in actor.model.parameters()]
            return norm, math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))

    for before, after in run_ranks(run, 2):
        assert before > 0.3
        assert after == pytest.approx(limit or before, rel=1e-5)


def test_update_weights_gives_the_whole_policy():
    args = make_args()

    def run():
        with fsdp_world() as world:
            actor = _make_actor(args, world)
            initial = [parameter.clone() for parameter in actor.update_weights().parameters()]
            shard = make_shard(args, make_samples(0), world, vocab_size=VOCAB_SIZE)
            list(actor.train(0, shard))
            replica = actor.update_weights()
            trained = [parameter.full_tensor() for parameter in actor.model.parameters()]
            seeded = list(build_seeded_gpt(args, VOCAB_SIZE, world.device).parameters())
            equal = [
                [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
                for first, second in ((initial, seeded), (list(replica.parameters()), trained), (initial, trained))
            ]
            return [all(equal[0]), all(equal[1]), any(equal[2])]

    assert run_ranks(run, 2) == [[True, True, False]] * 2


def test_the_reference_stays_at_the_seeded_weights():
    def run():
        with fsdp_world() as world:
            steps, _ = _train(make_args("--use-kl-loss"), world, [make_samples(0), make_samples(0)])
            return [step["rollout/ref_log_probs"] for step in steps], [step["train/kl_loss"] for step in steps]

    ref_log_probs, kl = run_ranks(run, 1)[0]
    assert len(set(ref_log_probs)) == 1
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert abs(kl[-1]) > 1e-4


def test_a_log_prob_that_is_not_finite_stops_every_rank_and_names_the_sample():
    args = make_args()

    def run():
        with fsdp_world() as world:
            actor = _make_actor(args, world)
            shard = make_shard(args, make_samples(0), world, vocab_size=VOCAB_SIZE)
            compute = actor._compute_log_probs

            def spoil(iterators, num_microbatches, *, store_prefix):
                columns = compute(iterators, num_microbatches, store_prefix=store_prefix)
                for index, values, mask in zip(
                    shard["sample_indices"], columns["log_probs"], shard["loss_masks"], strict=True
                ):
                    values[~torch.tensor(mask, dtype=torch.bool)] = math.nan  # may be anything there
                    if index == 5:
                        values[mask.index(1)] = -math.inf
                return columns

            actor._compute_log_probs = spoil
            list(actor.train(3, shard))

    position = make_samples(0)[5].loss_mask.index(1)
    for error in run_ranks_to_errors(run, 2):
        assert isinstance(error, NonFiniteError)
        assert f"rollout 3: log_probs of sample 5 is -inf at response token {position};" in str(error)


def test_a_gradient_that_is_not_finite_stops_before_the_optimizer_step():
    args = make_args()

    def run():
        with fsdp_world() as world:
            actor = _make_actor(args, world)
            shard = make_shard(args, make_samples(0), world, vocab_size=VOCAB_SIZE)
            if world.rank == 1:
                spoiled = actor_module.loss_function
                actor_module.loss_function = lambda *call: (spoiled(*call)[0] * math.nan, *spoiled(*call)[1:])
            before = [parameter.full_tensor().clone() for parameter in actor.model.parameters()]
            with pytest.raises(
                NonFiniteError, match=r"rollout 0, step 0: loss .*, gradient norm nan; .* was not made"
            ):
                list(actor.train(0, shard))
            after = [parameter.full_tensor() for parameter in actor.model.parameters()]
            return all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), actor.num_steps_done

    assert run_ranks(run, 2) == [(True, 0)] * 2


@pytest.mark.parametrize(
    "options, needed",
    [
        ([], True),
        (["--use-rollout-logprobs"], False),
        (["--use-rollout-logprobs", "--get-mismatch-metrics"], True),
        (["--use-tis"], True),
        (["--loss-type", "sft_loss"], False),
    ],
)
def test_old_log_probs_are_computed_where_they_are_used(options, needed):
    assert needs_old_log_probs(make_args(*options)) is needed
