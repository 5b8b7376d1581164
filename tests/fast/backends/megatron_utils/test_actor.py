"""The Megatron-Core actor: checkpoints, what stops it, and runs from the command line."""

import json
import math
from functools import partial

import pytest

from miles.backends.training_utils.backend import open_backend
from miles.backends.training_utils.finite_checks import NonFiniteError
from miles.backends.training_utils.parallel import get_parallel_state
from miles.trainer import main
from miles.training_loop import make_shard
from miles.utils.errors import UserError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks, run_ranks_to_errors, run_ranks_to_outcomes
from tests.fast.backends.experimental.fsdp_utils.rollouts import PAD_TOKEN_ID, VOCAB_SIZE, make_args, make_samples
from tests.fast.backends.megatron_utils.worlds import LAYOUTS, MEGATRON, run_actors


def _train(actor, rollouts):
    steps = []
    for rollout_id in rollouts:
        shard = make_shard(actor.args, make_samples(rollout_id), get_parallel_state().intra_dp, vocab_size=VOCAB_SIZE)
        steps += actor.train(rollout_id, shard)
    return steps


def _train_and_save(actor):
    _train(actor, [0])
    actor.save(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_goes_on_with_the_same_numbers(layout, tmp_path):
    world_size, options = LAYOUTS[layout]
    save = [*options, "--save", str(tmp_path)]

    def train_on(actor):
        _train_and_save(actor)
        return _train(actor, [1])

    def resume(actor):
        assert actor.start_rollout_id == 1
        return _train(actor, [1])

    expected = run_actors(save, world_size, train_on)
    found = run_actors([*save, "--load", str(tmp_path)], world_size, resume)
    assert found == expected
    assert math.isfinite(found[0][0]["train/loss"])


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "cp2"])
def test_the_reference_gives_the_kl_of_fsdp(layout, tmp_path):
    world_size, options = LAYOUTS[layout]
    kl = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"]
    train = partial(_train, rollouts=[0, 1])

    def fsdp():
        args = make_args("--num-layers", "4", *kl)
        with open_backend(args) as (world, make_actor):
            return train(make_actor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=PAD_TOKEN_ID))

    [expected] = run_ranks(fsdp, 1)
    assert abs(expected[-1]["train/kl_loss"]) > 1e-5
    for steps in run_actors([*options, *kl], world_size, train):
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    # A checkpoint as the reference: the trained policy, against which a fresh one has a KL from the start.
    run_actors([*options, "--save", str(tmp_path)], world_size, _train_and_save)
    for steps in run_actors([*options, *kl, "--ref-load", str(tmp_path)], world_size, partial(_train, rollouts=[0])):
        assert steps[0]["train/kl_loss"] > 1e-6


def test_a_checkpoint_of_another_layout_is_refused(tmp_path):
    run_actors(["--save", str(tmp_path)], 1, _train_and_save)

    def load():
        args = make_args(*MEGATRON, "--load", str(tmp_path), "--pipeline-model-parallel-size", "2")
        with open_backend(args) as (world, make_actor):
            make_actor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=0)

    for error in run_ranks_to_errors(load, 2):
        assert isinstance(error, UserError)
        assert "pipeline_model_parallel_size 1 there, 2 here" in str(error)


def test_a_damaged_file_of_one_rank_stops_both(tmp_path):
    run_actors(["--save", str(tmp_path)], 2, _train_and_save)
    (tmp_path / "iter_0000001" / "state" / "rank_00001.pt").write_bytes(b"garbled")

    def load():
        args = make_args(*MEGATRON, "--load", str(tmp_path))
        with open_backend(args) as (world, make_actor):
            make_actor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=0)

    for error in run_ranks_to_errors(load, 2):
        assert isinstance(error, UserError) and "is damaged: rank_00001.pt" in str(error)


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_step(layout):
    world_size, options = LAYOUTS[layout]

    def run():
        args = make_args(*MEGATRON, *options)
        with open_backend(args) as (world, make_actor):
            actor = make_actor(args, world, vocab_size=VOCAB_SIZE, pad_token_id=0)
            if world.rank == 1:
                next(iter(actor.chunks[-1].parameters())).data.fill_(math.nan)
            actor._compute_log_probs = lambda *args, **kwargs: {}
            actor.args.use_rollout_logprobs = True
            _train(actor, [0])

    for error in run_ranks_to_errors(run, world_size):
        assert isinstance(error, NonFiniteError), error


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, ["--context-parallel-size", "4"]),
        (4, ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "4"]),
    ],
)
def test_processes_that_do_not_fit_the_axes(world_size, options):
    def run():
        with open_backend(make_args(*MEGATRON, "--num-attention-heads", "4", *options)):
            pass

    for error in run_ranks_to_errors(run, world_size, time_limit=30):
        assert isinstance(error, UserError)
        assert f"{world_size} processes cannot be arranged as" in str(error)


TINY = ["--hidden-size", "8", "--num-attention-heads", "2", "--max-position-embeddings", "32", "--num-rollout", "2"]
TINY += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--lr", "0.01", "--entropy-coef", "0.05"]


def test_the_command_trains_the_same_run_as_fsdp(tmp_path):
    def run(name, *options):
        return lambda: main([*TINY, "--num-layers", "4", "--output-dir", str(tmp_path / name), *options])

    megatron = ["--train-backend", "megatron", "--pipeline-model-parallel-size", "2"]
    assert run_ranks(run("fsdp"), 1) == [0]
    assert [value for value, _, _ in run_ranks_to_outcomes(run("megatron", *megatron), 2)] == [0, 0]
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("megatron", "fsdp")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in b:
            assert key.startswith("perf/") or a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key
