"""Checkpoints: whole at every moment, readable by any number of processes, damage named."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from miles.backends.experimental.fsdp_utils import checkpoint as fsdp_checkpoint
from miles.backends.experimental.fsdp_utils.model import shard_model
from miles.backends.experimental.fsdp_utils.models.gpt import GPT, GPTConfig
from miles.backends.experimental.fsdp_utils.parallel import fsdp_world
from miles.backends.training_utils import checkpoint
from miles.utils.errors import UserError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks, run_ranks_to_outcomes

ARCHITECTURE = {"hidden_size": 8, "num_layers": 1}


def _model_and_optimizer(world, *, seed=0):
    config = GPTConfig(vocab_size=7, hidden_size=8, num_layers=1, num_attention_heads=2, max_position_embeddings=6)
    model = shard_model(GPT(config, seed=seed), world)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _step(model, optimizer):
    """Make one optimizer step on data that is the same on every rank, and return the loss before it."""
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    layout = torch.tensor([0, 5], dtype=torch.int32)
    loss = torch.nn.functional.cross_entropy(model(tokens, torch.arange(5)[None], layout, 5)[0, :-1], tokens[0, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _save(root, model, optimizer, iteration, **meta):
    meta = {"architecture": ARCHITECTURE, **meta}
    return checkpoint.save_checkpoint(
        root, lambda folder: fsdp_checkpoint.write_state(folder, model, optimizer), meta=meta, iteration=iteration
    )


def _train_and_save(root, *, iteration=3):
    """Make steps, save, and return the losses of the two steps that follow."""
    with fsdp_world() as world:
        model, optimizer = _model_and_optimizer(world)
        for _ in range(iteration):
            _step(model, optimizer)
        _save(root, model, optimizer, iteration, rollout_id=iteration - 1)
        return [_step(model, optimizer) for _ in range(2)]


def _load_and_train(root):
    with fsdp_world() as world:
        model, optimizer = _model_and_optimizer(world, seed=1)
        folder = checkpoint.find_latest_checkpoint(root)
        fsdp_checkpoint.load_model(folder, model, flag="--load")
        fsdp_checkpoint.load_optimizer(folder, model, optimizer, flag="--load")
        return [_step(model, optimizer) for _ in range(2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints that one process and two processes wrote, and the two losses that follow."""
    root = tmp_path_factory.mktemp("saved")
    losses = [run_ranks(lambda: _train_and_save(root / "deep" / str(size)), size)[0] for size in (1, 2)]  # noqa: B023
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] != losses[0][1]
    return root / "deep", losses[0]


@pytest.mark.parametrize("writers, readers", [("1", 1), ("1", 2), ("2", 1)])
def test_any_number_of_processes_continues(saved, writers, readers):
    root, losses = saved
    # Sharding is a layout: every element goes through the same operations, up to the mean over equal ranks.
    assert run_ranks(lambda: _load_and_train(root / writers), readers) == [pytest.approx(losses, rel=1e-6)] * readers


def test_files(saved):
    root = saved[0] / "2"
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "3"
    meta = checkpoint.read_meta(root / "iter_0000003", architecture=ARCHITECTURE, flag="--load")
    assert meta == {"architecture": ARCHITECTURE, "rollout_id": 2}


@pytest.mark.parametrize("moment", ["writing the state", "renaming the folder", "naming it the latest"])
def test_a_run_killed_while_saving_leaves_the_checkpoint_before(saved, tmp_path, moment):
    shutil.copytree(saved[0] / "1", tmp_path, dirs_exist_ok=True)
    owner, name, is_the_moment = {
        "writing the state": (fsdp_checkpoint.dcp, "save", lambda state: True),
        "renaming the folder": (Path, "rename", lambda path: path.name == "iter_0000004.tmp"),
        "naming it the latest": (checkpoint, "write_atomically", lambda path: path.name == checkpoint.TRACKER_NAME),
    }[moment]
    original = getattr(owner, name)

    def die(first, *args, **kwargs):
        if is_the_moment(first):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(first, *args, **kwargs)

    def die_in_save():
        setattr(owner, name, die)
        _train_and_save(tmp_path, iteration=4)

    [(_, error, _)] = run_ranks_to_outcomes(die_in_save, 1)
    assert isinstance(error, EOFError)
    assert len(list(tmp_path.glob("iter_0000004*"))) == 1
    assert checkpoint.find_latest_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    # The next run passes the same point and tidies up.
    run_ranks(lambda: _train_and_save(tmp_path, iteration=4), 1)
    assert checkpoint.find_latest_checkpoint(tmp_path) == tmp_path / "iter_0000004"
    assert not list(tmp_path.glob("*.tmp"))


def test_no_tracker_is_no_checkpoint(tmp_path):
    assert checkpoint.find_latest_checkpoint(tmp_path) is None
    assert checkpoint.find_latest_checkpoint(tmp_path / "absent") is None


def test_damaged_trackers(tmp_path):
    tracker = tmp_path / checkpoint.TRACKER_NAME
    tracker.write_text("seven\n")
    with pytest.raises(UserError, match="is damaged: expected the number of a checkpoint, got 'seven'"):
        checkpoint.find_latest_checkpoint(tmp_path)
    tracker.write_text("7")
    with pytest.raises(UserError, match=r"names checkpoint 7, but .*iter_0000007 is missing"):
        checkpoint.find_latest_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"architecture": 3}'])
def test_damaged_meta(tmp_path, text):
    if text is not None:
        (tmp_path / "meta.json").write_text(text)
    with pytest.raises(UserError, match=r"\(--load\) is damaged: meta.json"):
        checkpoint.read_meta(tmp_path, architecture=ARCHITECTURE, flag="--load")


def test_another_backend_is_named(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"architecture": {"train_backend": "megatron", "num_layers": 4}}))
    with pytest.raises(UserError, match=r"\(--load\) was written by --train-backend megatron, and this run's is fsdp"):
        checkpoint.read_meta(tmp_path, architecture={"train_backend": "fsdp", "num_layers": 1}, flag="--load")


def test_another_architecture_names_what_differs(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"architecture": {"hidden_size": 8, "num_layers": 4}}))
    with pytest.raises(UserError, match=r"\(--ref-load\) is of another architecture: num_layers 4 there, 1 here;"):
        checkpoint.read_meta(tmp_path, architecture=ARCHITECTURE, flag="--ref-load")


@pytest.mark.parametrize("damage", ["truncated", "missing", "no index", "garbled index"])
def test_damaged_state(saved, tmp_path, damage, caplog):
    shutil.copytree(saved[0] / "1", tmp_path, dirs_exist_ok=True)
    state = checkpoint.find_latest_checkpoint(tmp_path) / "state"
    data, index = state / "__0_0.distcp", state / ".metadata"
    {
        "truncated": lambda: data.write_bytes(data.read_bytes()[:100]),
        "missing": data.unlink,
        "no index": index.unlink,
        "garbled index": lambda: index.write_bytes(b"garbled"),
    }[damage]()

    def load():
        with pytest.raises(UserError, match=r"iter_0000003 \(--load\) is damaged: \w+:"):
            _load_and_train(tmp_path)
        return [record.getMessage() for record in caplog.records if record.name == "root"]  # what a person would see

    assert run_ranks(load, 1) == [[]]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")

    def save():
        with pytest.raises(UserError, match=r"cannot write a checkpoint under .*file \(--save\)"):
            _train_and_save(tmp_path / "file", iteration=1)

    run_ranks(save, 2)
