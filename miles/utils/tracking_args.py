"""Resolution and rules of `--tracking` and the options that belong to it."""

import re
from importlib import metadata
from typing import Any

from miles.utils.errors import UserError
from miles.utils.options.run import TRACKING

MINIMUM_VERSIONS = {"tensorboard": "2.18", "wandb": "0.28"}
"""Oldest release of each package that works here; its extra has the package's name. Older TensorBoards do not read
arrays with NumPy 2; older W&Bs set no limit to how long a run's end waits for an upload."""

_FORBIDDEN_CHARACTERS = {"wandb_project": "/\\#?%:", "wandb_run_id": ":;,#?/'"}
"""What W&B admits in no such name."""


def resolve_tracking_args(args: Any) -> None:
    """Make `args.tracking` a list of tools in a fixed order, each once and jsonl first, in place.

    Raises:
        UserError: it is neither a name nor a list of names, or a name is unknown.
    """
    given = [] if args.tracking is None else args.tracking
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or any(name not in TRACKING for name in names):
        raise UserError(f"--tracking takes one or several of {', '.join(TRACKING)}; got {given!r}")
    args.tracking = [name for name in TRACKING if name == TRACKING[0] or name in names]


def validate_tracking_args(args: Any) -> None:
    """Check that the tools named are installed, and W&B's names are such as W&B admits.

    Raises:
        UserError: a package is missing or too old, or a name is not admitted.
    """
    for name in args.tracking:
        if name in MINIMUM_VERSIONS:
            _check_installed(name, MINIMUM_VERSIONS[name])
    for name in ("wandb_project", "wandb_team", "wandb_group", "wandb_run_id"):
        value, forbidden = getattr(args, name), _FORBIDDEN_CHARACTERS.get(name, "")
        if value is not None and (value != value.strip() or not value or set(value) & set(forbidden)):
            without = f" and none of {' '.join(forbidden)}" if forbidden else ""
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} must be a name without space around it{without}; got {value!r}")


def _check_installed(package: str, minimum: str) -> None:
    """Check a package's version without importing it."""
    fix = f'in this project\'s folder: pip install -e ".[{package}]"'
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UserError(f"--tracking {package} needs the package {package}, which is not installed; {fix}") from None
    if _numbers(version) < _numbers(minimum):
        raise UserError(f"--tracking {package} needs {package}>={minimum}, and {version} is installed; {fix}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
