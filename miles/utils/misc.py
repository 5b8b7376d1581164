"""Small helpers that belong to no other room."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.utils.errors import UserError


def load_function(path: str) -> Callable[..., Any]:
    """Import the callable that a dotted path names.

    Args:
        path: `package.module.attribute`, importable from the working directory or an installed package.

    Returns:
        The attribute.

    Raises:
        UserError: the path has no dot, does not import, lacks the attribute, or names something not callable.
    """
    module_path, _, attribute = path.rpartition(".")
    if not module_path:
        raise UserError(f"{path!r} is not a function path; expected package.module.function")
    if os.getcwd() not in sys.path:  # `python DIR/train.py` has the script's folder there, not the user's
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # whatever a plug-in's import raises is the user's to read
        raise UserError(f"cannot import {module_path!r} for {path!r}: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise UserError(f"module {module_path!r} has no attribute {attribute!r} (from {path!r})")
    function = getattr(module, attribute)
    if not callable(function):
        raise UserError(f"{path!r} is a {type(function).__name__}, not a callable")
    return function


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the whole of it or none.

    Args:
        path: The file; its folder exists.
        content: What it will hold.

    Raises:
        OSError: it cannot be written; a file that was there before is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # where nothing can be written, there is nothing to remove
            temporary.unlink()
