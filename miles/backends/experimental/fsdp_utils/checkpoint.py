"""The state of an FSDP2 run (torch.distributed.checkpoint), readable by any number of processes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from miles.backends.training_utils.checkpoint import STATE_NAME
from miles.utils.distributed_utils import on_every_rank
from miles.utils.errors import UserError


def write_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write model and optimizer under the existing folder for the state; every rank calls this.

    Raises:
        UserError: the folder cannot be written.
    """
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    try:
        dcp.save(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise UserError(f"cannot write a checkpoint under {folder} (--save): {_first_cause(error)}") from error


def load_model(folder: Path, model: torch.nn.Module, *, flag: str) -> None:
    """Read a checkpoint's weights into a sharded model; every rank calls this.

    Raises:
        UserError: the checkpoint is damaged.
    """
    state = {"model": get_model_state_dict(model)}
    _read_state(folder, state, flag)
    set_model_state_dict(model, state["model"])


def load_optimizer(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, flag: str) -> None:
    """Read a checkpoint's optimizer state; every rank calls this.

    Raises:
        UserError: the checkpoint is damaged.
    """
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _read_state(folder, state, flag)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _read_state(folder: Path, state: dict[str, Any], flag: str) -> None:
    reader = dcp.FileSystemReader(folder / STATE_NAME)
    try:
        # dcp.load logs a missing index with a traceback before it raises; here the index is looked at first.
        on_every_rank(reader.read_metadata)
        dcp.load(state, storage_reader=reader)
    except (CheckpointException, Exception) as error:  # CheckpointException is a BaseException
        raise UserError(f"checkpoint {folder} ({flag}) is damaged: {_first_cause(error)}") from error


def _first_cause(error: BaseException) -> str:
    """Return one line about the first failure inside a `CheckpointException`, or about the exception itself."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return " ".join(f"{type(cause).__name__}: {cause}".split())
