"""Checkpoints that are whole at every moment; what stands in `state/` is the backend's business.

    ROOT/latest_checkpointed_iteration.txt    number of rollouts trained, e.g. 6
    ROOT/iter_0000006/meta.json               where the run stood, and the model's architecture
    ROOT/iter_0000006/state/                  model and optimizer

A checkpoint is written under a temporary name, renamed when it is complete, and only then named as the latest; a run
killed at any point in between leaves the one before it in force.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from miles.utils.distributed_utils import on_every_rank
from miles.utils.errors import UserError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
META_NAME = "meta.json"
STATE_NAME = "state"


def save_checkpoint(
    root: Path, write_state: Callable[[Path], None], *, meta: Mapping[str, Any], iteration: int
) -> Path:
    """Write one checkpoint; every rank calls this at the same point.

    Args:
        root: The folder of `--save`; made if absent.
        write_state: Called on every rank with the folder for the state, which exists; may run collectives.
        meta: Plain data to find again in `read_meta`.
        iteration: Rollouts trained so far, which names the checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: the folder cannot be written.
    """
    final = checkpoint_folder(root, iteration)
    partial = final.with_name(f"{final.name}.tmp")
    on_every_rank(lambda: _on_rank_0(lambda: _prepare(root, partial)))
    write_state(partial / STATE_NAME)
    on_every_rank(lambda: _on_rank_0(lambda: _publish(partial, final, meta, iteration)))
    return final


def find_latest_checkpoint(root: Path) -> Path | None:
    """Return the folder that the tracker of `root` names, or None where there is no tracker.

    Raises:
        UserError: `root` is a file, the tracker is not a number, or names a checkpoint that is not there.
    """
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file; checkpoints stand in a folder, as --save writes it")
    tracker = root / TRACKER_NAME
    if not tracker.exists():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not text.isdecimal():
        raise UserError(f"{tracker} is damaged: expected the number of a checkpoint, got {text[:40]!r}")
    folder = checkpoint_folder(root, int(text))
    if not folder.is_dir():
        raise UserError(
            f"{tracker} names checkpoint {int(text)}, but {folder} is missing; restore the folder, or write the "
            "number of one that is there into the file"
        )
    return folder


def make_root(root: Path) -> None:
    """Make the folder of `--save` before anything is trained that could not be saved.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write a checkpoint under {root} (--save): {error}") from error


def read_meta(folder: Path, *, architecture: Mapping[str, Any], flag: str) -> dict[str, Any]:
    """Return the `meta` of a checkpoint, after comparing its architecture with the run's.

    Args:
        folder: As `find_latest_checkpoint` returns it.
        architecture: The run's own, by argument name; stored as `meta["architecture"]`.
        flag: The option that named the checkpoint, for messages.

    Raises:
        UserError: the file is damaged, or an argument of the architecture differs (named, with both values).
    """
    path = folder / META_NAME
    try:
        meta = json.loads(path.read_text())
        stored = dict(meta["architecture"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"checkpoint {folder} ({flag}) is damaged: {path.name}: {error!r}") from error
    ours, theirs = architecture.get("train_backend"), stored.get("train_backend")
    if ours != theirs:
        raise UserError(
            f"checkpoint {folder} ({flag}) was written by --train-backend {theirs}, and this run's is {ours}; a "
            "backend reads its own checkpoints only"
        )
    differing = [name for name in architecture if architecture[name] != stored.get(name)]
    if differing:
        listed = ", ".join(f"{name} {stored.get(name)} there, {architecture[name]} here" for name in differing)
        raise UserError(
            f"checkpoint {folder} ({flag}) is of another architecture: {listed}; give the arguments it was trained "
            "with (vocab_size follows from --tokenizer-type)"
        )
    return meta


def checkpoint_folder(root: Path, iteration: int) -> Path:
    """Return where the checkpoint after `iteration` rollouts stands."""
    return root / f"iter_{iteration:07d}"


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` so that a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _on_rank_0(action: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        action()


def _prepare(root: Path, partial: Path) -> None:
    make_root(root)
    try:
        for leftover in root.glob("iter_*.tmp"):
            shutil.rmtree(leftover)
        (partial / STATE_NAME).mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write a checkpoint under {root} (--save): {error}") from error


def _publish(partial: Path, final: Path, meta: Mapping[str, Any], iteration: int) -> None:
    write_atomically(partial / META_NAME, json.dumps(meta, indent=2))
    if final.exists():  # written by a run that was killed before it named this checkpoint as the latest
        shutil.rmtree(final)
    partial.rename(final)
    write_atomically(final.parent / TRACKER_NAME, str(iteration))
