"""The command: exit statuses, files, what a person reads, and how it stops."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from miles.rollout.generate import generate_rollout
from miles.trainer import main
from tests.fast.backends.experimental.fsdp_utils.ranks import run_forked, run_ranks, run_ranks_to_outcomes
from tests.fast.tiny_runs import TINY, main_killed_in_rollout, read_metrics

REPOSITORY = Path(__file__).parents[2]


def _without_times(records):
    return [{key: value for key, value in record.items() if not key.startswith("perf/")} for record in records]


def _summary(text):
    """Return the closing summary; some versions of gloo write to the standard output, too."""
    return text[re.search(r"^(finished|stopped): ", text, re.MULTILINE).start() :]


def _run(directory, *options, world_size=1):
    """Train in forked processes and return the metrics."""
    command = [*TINY, "--output-dir", str(directory), *options]
    assert run_ranks(lambda: main(command), world_size) == [0] * world_size
    return read_metrics(directory)


def _wait_for(condition, process, *, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)


def test_train_py_from_a_shell(tmp_path):
    command = [sys.executable, str(REPOSITORY / "train.py"), *TINY, "--loss-aggregation", "prompt_mean"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    [directory] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-prompt_mean", directory.name)
    assert sorted(path.name for path in directory.iterdir()) == ["args.json", "metrics.jsonl", "train.log"]
    records = read_metrics(directory)
    assert [record["train/step"] for record in records] == list(range(12))
    assert [record["rollout/step"] for record in records] == [step // 2 for step in range(12)]
    for record in records:
        assert record.keys() >= {
            *("train/loss", "train/pg_loss", "train/pg_clipfrac", "train/ppo_kl", "train/entropy_loss"),
            *(
                "train/grad_norm",
                "train/lr-pg_0",
                "train/num_tokens",
                "rollout/raw_reward",
                "rollout/response_lengths",
            ),
            *("perf/rollout_time", "perf/step_time"),
        }
    arguments = json.loads((directory / "args.json").read_text())
    assert (arguments["loss_aggregation"], arguments["global_batch_size"]) == ("prompt_mean", 2)
    for step in range(12):
        assert len(re.findall(rf"\bstep {step}: ", done.stderr)) == 1
    num_tokens = sum(record["train/num_tokens"] for record in records)
    rewards = [record["rollout/raw_reward"] for record in records]
    first, second, *_ = _summary(done.stdout).splitlines()
    assert re.fullmatch(
        rf"finished: 6 of 6 rollouts, 12 optimizer steps, {num_tokens} response tokens trained on, [\d.]+ s", first
    )
    assert second == (
        f"reward: {sum(rewards[:10]) / 10:.3f} over the first 10 steps, {sum(rewards[-10:]) / 10:.3f} over the last 10"
    )
    assert f"runs/{directory.name}/" in done.stdout


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not(tmp_path):
    first, again = (_without_times(_run(tmp_path / name)) for name in ("first", "again"))
    assert first == again
    assert _without_times(_run(tmp_path / "other", "--seed", "7")) != first


def test_two_processes_give_the_metrics_of_one(tmp_path):
    options = ["--num-rollout", "3", "--rollout-batch-size", "4", "--loss-aggregation", "prompt_mean"]
    one, two = (_without_times(_run(tmp_path / str(size), *options, world_size=size)) for size in (1, 2))
    assert len(one) == len(two) == 6
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


RESUMABLE = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--lr-decay-style", "cosine"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return _without_times(_run(tmp_path_factory.mktemp("whole"), *RESUMABLE))


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_and_resumed_is_the_run_that_was_not_killed(tmp_path, uninterrupted, world_size):
    directory, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    saving = ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "2"]
    command = [*TINY, "--output-dir", str(directory), *RESUMABLE, *saving]
    [first, *_] = run_ranks_to_outcomes(lambda: main_killed_in_rollout(4, command), world_size)
    assert isinstance(first[1], EOFError)
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [record["train/step"] for record in read_metrics(directory)] == list(range(9))
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"train/step": 9, "rollout/st')
    resumed = _without_times(_run(directory, *RESUMABLE, *saving, world_size=world_size))
    assert [record["train/step"] for record in resumed] == list(range(12))
    for ours, theirs in zip(resumed, uninterrupted, strict=True):
        assert ours == (theirs if world_size == 1 else pytest.approx(theirs, rel=1e-5, abs=1e-6))


def test_a_complete_run_has_nothing_left_to_do(tmp_path):
    checkpoints = str(tmp_path / "checkpoints")
    options = ["--num-rollout", "1", "--save", checkpoints, "--load", checkpoints]
    metrics = _run(tmp_path / "run", *options)
    assert _run(tmp_path / "run", *options) == metrics


def test_ctrl_c(tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"

    def press(process):
        _wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, process)
        while process.is_alive():  # a launcher passes on what the terminal has sent, and people are impatient
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.001)

    command = [*TINY, "--num-rollout", "100000", "--output-dir", str(metrics.parent)]
    status, out, err = run_forked(lambda: main(command), tmp_path, meanwhile=press)
    assert status == 130, err
    num_steps = len(read_metrics(metrics.parent))
    assert re.match(rf"stopped: \d+ of 100000 rollouts, {num_steps} optimizer steps, ", _summary(out))
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--loss-aggregation", "median"], "Unknown --loss-aggregation mode 'median'"),
        (["--loss-aggregation", "prompt_mean", "--calculate-per-token-loss"], "--calculate-per-token-loss"),
        (["--load-debug-rollout-data", "absent.pt"], "absent.pt"),
        (["--load-debug-rollout-data", "dump{rollout_id}.pt"], "dump0.pt"),
        (["--prompt-data", "broken.jsonl", "--rm-type", "numeric", "--label-key", "label"], "broken.jsonl, line 2"),
        (["--load", "damaged"], "damaged/latest_checkpointed_iteration.txt is damaged"),
        (["--use-kl-loss", "--ref-load", "absent"], "no checkpoint in absent (--ref-load)"),
        (["--output-dir", "file"], "cannot make the output folder (--output-dir)"),
        (["--save-debug-rollout-data", "file/dump.pt"], "file/dump.pt"),
    ],
)
def test_what_a_person_has_to_mend_is_one_line_and_status_2(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"input": "1+1=", "label": 2}\n{"input": \n')
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "latest_checkpointed_iteration.txt").write_text("x")
    status, _, text = run_forked(lambda: main([*TINY, *options]), tmp_path)
    assert status == 2, text
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], text


def test_help_needs_no_torch():
    code = (
        "import sys; from miles.trainer import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "--loss-aggregation" in done.stdout


def test_checkpoints_of_another_run_are_not_written_over(tmp_path):
    save = ["--save", str(tmp_path / "checkpoints")]
    _run(tmp_path / "first", *save, "--num-rollout", "1")
    command = [*TINY, "--output-dir", str(tmp_path / "second"), *save]
    status, _, err = run_forked(lambda: main(command), tmp_path)
    assert status == 2
    assert "holds the checkpoints of another run; continue that run with --load" in err


@pytest.mark.parametrize(
    "num_steps, message",
    [
        ("1", "rollout 1: sample 4 was sampled with log-probs that are not finite"),
        ("2", "rollout 0, step 1: loss nan, gradient norm nan"),
    ],
)
def test_divergence_stops_with_status_1_and_keeps_the_metrics(tmp_path, num_steps, message):
    command = [*TINY, "--lr", "1e30", "--num-steps-per-rollout", num_steps, "--output-dir", str(tmp_path / "run")]
    status, out, err = run_forked(lambda: main(command), tmp_path)
    assert status == 1, err
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {message}")
    assert len(read_metrics(tmp_path / "run")) == 1
    assert "Traceback" not in err
    assert _summary(out).startswith("stopped: ")


def rollout_failing_on_rank_1(args, rollout_id, data_source, model, tokenizer, *, rank, world_size, device):
    """A rollout function whose second rank fails in the second rollout."""
    if rank == 1 and rollout_id == 1:
        raise OSError("the disk is full")
    return generate_rollout(
        args, rollout_id, data_source, model, tokenizer, rank=rank, world_size=world_size, device=device
    )


def rewards_failing_on_rank_1(args, samples):
    """A reward post-processing that fails on the second rank in the second rollout."""
    if torch.distributed.get_rank() == 1 and samples[0].index > 0:
        raise OSError("the disk is full")
    return [sample.reward for sample in samples], [sample.reward for sample in samples]


@pytest.mark.parametrize(
    "option, function",
    [
        ("--rollout-function-path", rollout_failing_on_rank_1),
        ("--custom-reward-post-process-path", rewards_failing_on_rank_1),
    ],
)
def test_a_rank_that_fails_stops_the_other(tmp_path, option, function):
    command = [*TINY, "--output-dir", str(tmp_path), option, f"{__name__}.{function.__name__}"]
    outcomes = run_ranks_to_outcomes(lambda: main(command), 2)
    assert isinstance(outcomes[1][1], OSError)
    assert "rank 1 failed: OSError: the disk is full" in str(outcomes[0][1])
    assert len(read_metrics(tmp_path)) == 2


@pytest.mark.parametrize("name", ["args.json", "train.log", "metrics.jsonl"])
def test_a_file_of_the_run_that_cannot_be_written_stops_every_rank(name, tmp_path):
    (tmp_path / "run" / name).mkdir(parents=True)
    command = [*TINY, "--output-dir", str(tmp_path / "run")]
    outcomes = run_ranks_to_outcomes(lambda: main(command), 2)
    assert [status for status, *_ in outcomes] == [2, 2], outcomes
    status, _, errors = run_forked(lambda: main(command), tmp_path)
    assert status == 2 and errors.startswith("error: cannot write") and errors.count("\n") == 1
    assert f"run/{name}" in errors and "--output-dir" in errors


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_a_process_leaves_with_its_status_and_all_that_it_said(world_size):
    program = "import sys; from miles.trainer import leave; sys.stdout.write('said'); leave(3)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "WORLD_SIZE": world_size}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "")
