"""Rollout dumps: the samples of one rollout in the host trainers' file format.

A dump is `torch.save({"rollout_id": int, "samples": [Sample.to_dict(), ...]})` of plain data, tensors and numpy's
numbers and arrays only, since it is read with `weights_only=True`.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles.ray.rollout.row_checks import short
from miles.rollout.plain_dump import load_plain
from miles.utils.errors import UserError
from miles.utils.misc import dump_path, write_whole
from miles.utils.types import Sample

_CONSTRUCTORS: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]

NUMPY_DATA: list[Any] = [
    *(np.ndarray, np.dtype),
    *{type(np.dtype(kind)) for kind in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?SU"},
    *(
        (function, f"numpy.{core}.multiarray.{function.__name__}")
        for core in ("core", "_core")
        for function in _CONSTRUCTORS
    ),
]
"""What `torch.load` may import: what builds numpy's numbers and arrays, which hosts put into rewards, extra columns.
None of it runs code of the file. numpy 1 and 2 have the two functions under different names."""


def save_rollout_dump(path_template: str, rollout_id: int, samples: list[Sample]) -> Path:
    """Write the samples so that a reader sees the whole file or none.

    Args:
        path_template: File path; may contain `{rollout_id}`. Missing parent folders are made.
        rollout_id: Which rollout.
        samples: Its samples.

    Returns:
        The path written.

    Raises:
        UserError: a sample carries an object that `weights_only=True` would refuse to read, or the path cannot be
            written.
    """
    path = dump_path(path_template, rollout_id)
    buffer = io.BytesIO()
    try:
        torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, buffer)
        if load_plain(buffer) is None:
            _load_safely(io.BytesIO(buffer.getvalue()))
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise UserError(
            f"rollout {rollout_id} cannot be saved to {path}: samples may hold plain data and tensors only, "
            f"but a custom function put in something else: {_refused_name(error) or error}"
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, buffer.getvalue())
    except OSError as error:
        raise UserError(f"cannot write rollout data {path}: {error.strerror}") from error
    return path


def load_rollout_dump(path_template: str, rollout_id: int) -> list[Sample]:
    """Read the samples of a dump, in the order in which they were saved.

    Args:
        path_template: File path; may contain `{rollout_id}`.
        rollout_id: Fills the placeholder.

    Raises:
        UserError: the file is missing, cut off, no torch file, carries code, or does not hold a list of samples with
            tokens and a known status.
    """
    path = dump_path(path_template, rollout_id)
    return [sample_of_row(f"{path}, sample {place}", row) for place, row in enumerate(read_dump_rows(path))]


def read_dump_rows(path: Path) -> Sequence[Any]:
    """Read the rows of a dump as they are, at least one, without a look at what they hold.

    Args:
        path: The file.

    Raises:
        UserError: the file is missing, cut off, no torch file, carries code, or does not hold a list of samples.
    """
    data = _read(path)
    if not isinstance(data, Mapping) or "samples" not in data:
        got = f"a mapping with keys {sorted(map(str, data))}" if isinstance(data, Mapping) else type(data).__name__
        raise UserError(f"{path} is no rollout dump: expected a mapping with the key 'samples', got {got}")
    rows = data["samples"]
    if not isinstance(rows, list | tuple):
        raise UserError(f"{path}: 'samples' must be a list, got {type(rows).__name__}")
    if not rows:
        raise UserError(f"{path} holds an empty rollout; expected at least one sample")
    return rows


def sample_of_row(where: str, row: Any) -> Sample:
    """Return the sample that a dump's row stores.

    Args:
        where: How the message begins where the row cannot be used: the file and the row's place in it.
        row: Of `read_dump_rows`.

    Raises:
        UserError: the row is no mapping, or has no tokens, no response_length or an unknown status.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected a mapping of sample fields, got {type(row).__name__}")
    if not isinstance(row.get("tokens"), list) or not row["tokens"]:
        raise UserError(f"{where}: 'tokens' must be a list of at least one token id, got {short(row.get('tokens'))}")
    if "response_length" not in row:
        raise UserError(
            f"{where}: 'response_length' is missing; give the number of response tokens, the last of 'tokens'"
        )
    try:
        return Sample.from_dict(dict(row))
    except ValueError as error:
        allowed = [status.value for status in Sample.Status]
        raise UserError(f"{where}: unknown status {short(row.get('status'))}; expected one of {allowed}") from error


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError as error:
        raise UserError(f"cannot read rollout data {path}: {error.strerror}") from error
    # A zip's directory is its last part, so a file that starts as one but is none has lost its end.
    if head == b"PK" and not zipfile.is_zipfile(path):
        raise UserError(f"{path} is truncated: its end is missing; copy or write it again")
    # torch.save's older format is pickle protocol 2; any later one comes from elsewhere.
    if head[:1] == b"\x80" and head != b"\x80\x02":
        raise _refused(path, "it is a bare Python pickle")
    data = load_plain(path)
    if data is not None:
        return data
    try:
        return _load_safely(path)
    except Exception as error:  # a damaged file may raise anything
        refused = _refused_name(error)
        if refused is not None:
            raise _refused(path, f"it carries pickled code, {refused}") from error
        raise UserError(
            f"{path} is damaged, or not a file that torch.save wrote; "
            f"expected a dump made by --save-debug-rollout-data"
        ) from error


def _load_safely(file: Path | io.BytesIO) -> Any:
    with torch.serialization.safe_globals(NUMPY_DATA):
        return torch.load(file, map_location="cpu", weights_only=True)


def _refused(path: Path, reason: str) -> UserError:
    return UserError(f"{path} was refused for safety: {reason}; a dump may hold plain data and tensors only")


def _refused_name(error: Exception) -> str | None:
    """Return the name of the global that a weights-only load would not import, None if it failed otherwise."""
    match = re.search(
        r"GLOBAL ([\w.]+)|Unsupported class (\S+)|allowlisted .*, but got <class '([\w.]+)'>", str(error)
    )
    return match and (match[1] or match[2] or match[3]).rstrip(".")
