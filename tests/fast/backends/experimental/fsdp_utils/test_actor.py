"""The FSDP2 actor: the same training however the rollout is cut, and nothing that is not finite gets through."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from miles.backends.experimental.fsdp_utils import actor as actor_module
from miles.backends.experimental.fsdp_utils.actor import FSDPTrainActor
from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.backends.training_utils.train_actor import build_seeded_gpt, needs_old_log_probs
from miles.training_loop import make_shard
from miles.utils.finite_checks import NonFiniteError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks, run_ranks_to_errors
from tests.fast.backends.experimental.fsdp_utils.rollouts import (
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    make_args,
    make_samples,
    mode_options,
)

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
CUTS = {
    "micro-batches of 3": ["--micro-batch-size", "3"],
    "micro-batches of 1": ["--micro-batch-size", "1"],
    "token budget": ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "24", "--balance-data"],
}
TERMS = {
    "KL": ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"],
    "TIS": ["--use-tis", "--get-mismatch-metrics"],
    "entropy": ["--entropy-coef", "0.05"],
    "GSPO": ["--advantage-estimator", "gspo", "--normalize-advantages"],
    "SFT": ["--loss-type", "sft_loss", "--loss-aggregation", "token_mean"],
    "rollout log-probs": ["--use-rollout-logprobs"],
}


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
    samples = [make_samples(0), make_samples(1)]
    settings = {(mode, cut): [*mode_options(mode), *options] for mode in MODES for cut, options in CUTS.items()}
    whole = {key: options for key, options in settings.items() if key[1] == "micro-batches of 3"}
    one = run_ranks(_train_all(whole, samples), 1)[0]
    two = run_ranks(_train_all(settings, samples), 2)
    for (mode, cut), (rank, results) in itertools.product(settings, enumerate(two)):
        _assert_same_training(results[mode, cut], one[mode, "micro-batches of 3"], (mode, cut, rank))
    first_norms = {mode: one[mode, "micro-batches of 3"][0][0]["train/grad_norm"] for mode in MODES}
    assert min(first_norms.values()) > 1e-2
    assert len({round(norm, 3) for norm in first_norms.values()}) == len(MODES)


def test_the_same_with_every_other_term():
    samples = [make_samples(0)]
    one = run_ranks(_train_all(TERMS, samples), 1)[0]
    for results in run_ranks(_train_all(TERMS, samples), 2):
        for name in TERMS:
            _assert_same_training(results[name], one[name], name)


def test_a_rank_without_rows():
    samples = make_samples(0)
    size, half = len(samples), len(samples) // 2
    # Of two ranks the first has every row of step 0 and none of step 1, the second the other way round.
    cuts = {
        (0, 1): (slice(0, size), [half, half]),
        (0, 2): (slice(0, half), [half, 0]),
        (1, 2): (slice(half, size), [0, half]),
    }

    def run():
        results = {}
        with fsdp_world() as world:
            for mode in MODES:
                args = make_args(*mode_options(mode))
                whole = make_shard(args, samples, replace(world, rank=0, size=1), vocab_size=VOCAB_SIZE)
                rows, step_row_counts = cuts[world.rank, world.size]
                columns = {key: column for key, column in whole.items() if len(column) == size}
                shard = {key: column[rows] for key, column in columns.items()} | {"step_row_counts": step_row_counts}
                results[mode] = list(_make_actor(args, world).train(0, shard)), []
        return results

    one = run_ranks(run, 1)[0]
    for results in run_ranks(run, 2):
        for mode in MODES:
            _assert_same_training(results[mode], one[mode], mode)


def test_the_first_step_is_the_law_by_hand():
    samples = make_samples(0)
    settings = {mode: [*mode_options(mode), "--clip-grad", "0"] for mode in MODES}
    trained = run_ranks(_train_all(settings, [samples]), 1)[0]
    for mode, options in settings.items():
        loss, norm = _loss_and_gradient_norm(make_args(*options), samples[: len(samples) // 2], mode)
        first_step = trained[mode][0][0]
        assert first_step["train/loss"] == pytest.approx(loss, abs=1e-6), mode
        assert first_step["train/grad_norm"] == pytest.approx(norm, rel=1e-5), mode


def _loss_and_gradient_norm(args, samples, mode):
    """Return loss and gradient norm of one step in float64, sample by sample, with old = new policy (ratio 1)."""
    model = build_seeded_gpt(args, VOCAB_SIZE, torch.device("cpu")).double()
    total = torch.zeros((), dtype=torch.float64)
    rewards = [sample.reward for sample in samples]
    for index, sample in enumerate(samples):
        length, size = sample.response_length, len(sample.tokens)
        tokens = torch.tensor([sample.tokens])
        cu_seqlens = torch.tensor([0, size], dtype=torch.int32)
        log_probs = _float64_logits(model, tokens, cu_seqlens).log_softmax(-1)[0, -length - 1 : -1]
        log_probs = log_probs.gather(-1, tokens[0, -length:, None])[:, 0]
        group = [other for other in range(len(samples)) if samples[other].group_index == sample.group_index]
        mean = sum(rewards[other] for other in group) / len(group)
        std = math.sqrt(sum((rewards[other] - mean) ** 2 for other in group) / (len(group) - 1))
        advantage = (rewards[index] - mean) / (std + 1e-6)
        ratio = (log_probs - log_probs.detach()).exp()
        active = sum(sample.loss_mask)
        group_active = sum(sum(samples[other].loss_mask) for other in group)
        step_active = sum(sum(other.loss_mask) for other in samples)
        divisor = {
            "sample_mean": max(active, 1) * len(samples),
            "prompt_mean": max(group_active, 1) * len(samples) / 2,
            "token_mean": step_active,
            "constant": 7 * len(samples),
        }[mode]
        total = total - (ratio * torch.tensor(sample.loss_mask)).sum() * advantage / divisor
    total.backward()
    return total.item(), math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))


def _float64_logits(model, tokens, cu_seqlens):
    # The model hands out float32 logits; a float64 oracle takes them before that.
    captured = []
    handle = model.output.register_forward_hook(lambda module, inputs, output: captured.append(output))
    model(tokens, torch.arange(tokens.size(1))[None], cu_seqlens, tokens.size(1))
    handle.remove()
    return captured[0].reshape(1, tokens.size(1), -1)


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
