"""Plug-ins by dotted path, and files written whole."""

import contextlib
import importlib
import inspect
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


def wants_context(args: Any) -> bool:
    """Whether the run's custom reducer factory declares the keyword `context`."""
    path = getattr(args, "custom_pg_loss_reducer_function_path", None)
    return path is not None and declares_context(load_function(path))


def declares_context(factory: Callable[..., Any]) -> bool:
    """Whether a factory has a parameter of the name `context`."""
    try:
        return "context" in inspect.signature(factory).parameters
    except ValueError:  # a built-in that does not tell its signature
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the whole of it or none.

    A link stays, and what it points to is written. A device or a pipe is written into, and never replaced.

    Args:
        path: The file; its folder exists.
        content: What it will hold.

    Raises:
        OSError: it cannot be written; a file that was there before is as it was.
    """
    if _is_device(path):
        path.write_bytes(content)
        return
    target = _target(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        with contextlib.suppress(OSError):  # where nothing can be written, there is nothing to remove
            temporary.unlink()


def check_writable(path: Path, *, what: str, example: str) -> None:
    """Check that `write_whole` can write a file, before anything is computed for it.

    Args:
        path: The file.
        what: How the message begins, before the colon.
        example: The name of such a file.

    Raises:
        UserError: it is a folder, or lies in none; or there is no permission to write it.
    """
    if os.path.isdir(path):
        raise UserError(f"{what}: it is a folder; name a file in it, such as {path / example}")
    if _is_device(path):
        if not os.access(path, os.W_OK):
            raise UserError(f"{what}: no permission to write into it; name another file")
        return
    folder = _target(path).parent
    if not os.path.isdir(folder):
        raise UserError(f"{what}: {folder} is not a folder; make it first")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{what}: no permission to write into {folder}; name another folder")


def _is_device(path: Path) -> bool:
    """Whether something is there that is no regular file, such as a terminal or a pipe."""
    return os.path.exists(path) and not os.path.isfile(path)


def _target(path: Path) -> Path:
    """Return the file that a link points to in the end; of what is no link, the path as it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def dump_path(path_template: str, rollout_id: int) -> Path:
    """Return the template with `{rollout_id}` filled in.

    Raises:
        UserError: the template has another placeholder or an unmatched brace.
    """
    try:
        return Path(path_template.format(rollout_id=rollout_id))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise UserError(
            f"rollout data path {path_template!r}: the one placeholder allowed is {{rollout_id}} "
            f"(write a brace itself twice)"
        ) from error
