"""Which files hold changes that git does not have: those would be mixed up with what the drop-in writes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from miles.drop_in.checkout import Checkout
from miles.utils.errors import UserError

_POINTERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
"""Set while git runs a hook, for the repository of the hook."""

NOT_A_REPOSITORY = "not a git repository, so whether these files hold changes of your own is not known"


def uncommitted(checkout: Checkout, paths: Sequence[str]) -> list[str] | None:
    """Return those of the files that differ from the last commit, or that git does not have.

    Args:
        checkout: the checkout, itself a repository or a folder in one.
        paths: existing files, relative to it.

    Returns:
        The paths; None where that is not known, because the checkout is not in a git repository or there is no git.

    Raises:
        UserError: git refuses to look.
    """
    if not paths:
        return []
    try:
        inside = _git(checkout, "rev-parse", "--is-inside-work-tree")
    except FileNotFoundError:
        return None
    if inside.returncode != 0 and "not a git repository" in inside.stderr:
        return None
    tracked = _names(_git(checkout, "ls-files", "-z", "--", *paths), checkout)
    if _git(checkout, "rev-parse", "--verify", "--quiet", "HEAD").returncode != 0:
        return sorted(paths)
    changed = _names(
        _git(checkout, "diff", "--name-only", "--no-renames", "--relative", "-z", "HEAD", "--", *paths), checkout
    )
    return sorted(path for path in paths if path in changed or path not in tracked)


def _git(checkout: Checkout, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git on the checkout, whatever repository the environment points to, without the hooks of its monitor."""
    environment = {name: value for name, value in os.environ.items() if name not in _POINTERS}
    command = ["git", "--literal-pathspecs", "-c", "core.fsmonitor=false", "-C", str(checkout.root), *arguments]
    return subprocess.run(
        command,
        env={**environment, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
    )


def _names(result: subprocess.CompletedProcess[str], checkout: Checkout) -> set[str]:
    if result.returncode != 0:
        raise UserError(
            f"git cannot say whether files of {checkout.root} have uncommitted changes: {result.stderr.strip()}\n"
            "  fix that, or pass --force to go on without knowing"
        )
    return set(result.stdout.split("\0")) - {""}
