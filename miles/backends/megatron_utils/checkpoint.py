"""The state of a Megatron-Core run: one file for each rank, read back by a run of the same parallel layout."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from miles.backends.training_utils.checkpoint import STATE_NAME
from miles.utils.distributed_utils import on_every_rank
from miles.utils.errors import UserError


def rank_file(folder: Path) -> Path:
    """Return where this rank's state stands in the folder for the state."""
    return folder / f"rank_{dist.get_rank():05d}.pt"


def write_state(folder: Path, chunks: Sequence[GPTModel], optimizer: MegatronOptimizer) -> None:
    """Write this rank's chunks and the inner optimizers' state under an existing folder; every rank calls this.

    With the distributed optimizer the state is this rank's slice of it.

    Raises:
        UserError: a rank cannot write its file.
    """
    state = {
        "model": [chunk.state_dict() for chunk in chunks],
        "optimizer": [inner.state_dict() for inner in _inner_optimizers(optimizer)],
    }

    def write() -> None:
        try:
            torch.save(state, rank_file(folder))
        except OSError as error:
            raise UserError(f"cannot write a checkpoint under {folder} (--save): {error}") from error

    on_every_rank(write)


def read_model(folder: Path, chunks: Sequence[GPTModel], *, flag: str) -> None:
    """Read this rank's chunks; every rank calls this.

    Raises:
        UserError: a rank's file is missing or damaged.
    """
    state = _read(folder, flag)
    for chunk, weights in zip(chunks, state["model"], strict=True):
        chunk.load_state_dict(weights)


def read_optimizer(folder: Path, optimizer: MegatronOptimizer, *, flag: str) -> None:
    """Read this rank's optimizer state, over weights that `read_model` has read; every rank calls this.

    Raises:
        UserError: a rank's file is missing or damaged.
    """
    state = _read(folder, flag)
    for inner, values in zip(_inner_optimizers(optimizer), state["optimizer"], strict=True):
        inner.load_state_dict(values)
    optimizer.reload_model_params()


def _inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def _read(folder: Path, flag: str) -> dict[str, Any]:
    path = rank_file(folder / STATE_NAME)

    def read() -> dict[str, Any]:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"checkpoint {folder} ({flag}) is damaged: {path.name}: {reason}") from error

    return on_every_rank(read)
