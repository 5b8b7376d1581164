"""W&B's run files read back; importing this module skips where W&B is not installed.

A file is a log of LevelDB's format (blocks of 32 KiB; each piece has a checksum, a length and a kind) after a header
of 7 bytes, and each entry a protocol buffer.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed (extra `wandb`)")

from wandb.proto.wandb_internal_pb2 import Record

HEADER_BYTES = 7
BLOCK_BYTES = 32768
FULL, FIRST, LAST = 1, 2, 4


def run_files(directory: Path) -> list[Path]:
    """Return the run files of a run's folder, oldest first: a run and its resumptions have one each."""
    paths = (directory / "wandb").glob("*run-*/run-*.wandb")
    return sorted(paths, key=lambda path: (path.parent.name, path.stat().st_mtime))


def read_entries(path: Path) -> Iterator[Record]:
    """Yield a file's entries; what a killed process left unfinished at its end is left out."""
    data, position, entry = path.read_bytes(), HEADER_BYTES, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < 7:  # no room for another piece: zeros up to the next block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + length
        entry = (
            data[position - length : position] if kind in (FULL, FIRST) else entry + data[position - length : position]
        )
        if kind in (FULL, LAST) and position <= len(data):
            yield Record.FromString(entry)


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's history, without W&B's own keys but `_step`."""
    return [
        {key: value for key, value in _items(entry.history.item).items() if key == "_step" or key[0] != "_"}
        for entry in read_entries(path)
        if entry.WhichOneof("record_type") == "history"
    ]


def read_run(path: Path) -> Record:
    """Return the entry that describes the run."""
    return next(entry.run for entry in read_entries(path) if entry.WhichOneof("record_type") == "run")


def read_config(path: Path) -> dict[str, Any]:
    """Return the run's config."""
    return _items(read_run(path).config.update)


def read_exit_code(path: Path) -> int | None:
    """Return the status that the run was closed with, None where it was not closed."""
    entries = (entry for entry in read_entries(path) if entry.WhichOneof("record_type") == "exit")
    return next((entry.exit.exit_code for entry in entries), None)


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
