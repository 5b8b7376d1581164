"""The files of a host checkout: read from inside it only, as they are or as they would be."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from miles.utils.errors import UserError

Contents = Mapping[str, "bytes | None"]
"""What files hold, by path relative to the checkout; None for a file that is not there."""


class Checkout:
    """A folder that holds a host trainer.

    Paths are posix and relative to it. A path that leaves it, by itself or through a link, is an error, and nothing is
    read or written there. A link that stays inside stands for the file that it names.
    """

    def __init__(self, root: str | Path, contents: Contents | None = None) -> None:
        """Open the folder `root`.

        Args:
            root: the folder; an empty path is none.
            contents: files to be seen with other contents than they have; see `seen_with`.

        Raises:
            UserError: there is no such folder.
        """
        if not str(root) or not Path(root).is_dir():
            raise UserError(f"CHECKOUT must be the folder of a Miles or slime checkout; {str(root)!r} is no folder")
        self.root = Path(root).resolve()
        self._contents = dict(contents or {})

    def seen_with(self, contents: Contents) -> Checkout:
        """Return a view in which the files named have these contents; nothing is written."""
        return Checkout(self.root, {**self._contents, **{self.inside(path): data for path, data in contents.items()}})

    def inside(self, path: str) -> str:
        """Return the path of the file itself, relative to the checkout, with links inside the checkout followed.

        Raises:
            UserError: the path leaves the checkout, or is in its `.git`.
        """
        parts = PurePosixPath(path).parts
        if not parts or "\\" in path or "\0" in path or PurePosixPath(path).is_absolute() or ".." in parts:
            raise UserError(f"only files inside the checkout are touched, by a relative path; got {path!r}")
        try:
            real = (self.root / path).resolve()
        except (OSError, RuntimeError) as error:  # a loop of links; which of the two depends on the Python version
            raise UserError(f"{path} is a link that leads nowhere; replace it by a file") from error
        if not real.is_relative_to(self.root):
            raise UserError(
                f"{path} is reached through a link out of the checkout {self.root}, which is not followed; "
                "replace the link by a copy, or name the checkout that holds the file"
            )
        inside = real.relative_to(self.root)
        if ".git" in inside.parts:
            raise UserError(f"{path} belongs to git, and is not touched")
        return inside.as_posix()

    def locate(self, path: str) -> Path:
        """Return the absolute path of the file itself. Raises as `inside`."""
        return self.root / self.inside(path)

    def exists(self, path: str) -> bool:
        """Say whether there is a file or folder of that path. Raises as `inside`."""
        inside = self.inside(path)
        if inside in self._contents:
            return self._contents[inside] is not None
        return (self.root / inside).exists()

    def read(self, path: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            UserError: there is no such file, it cannot be read, or as `inside`.
        """
        inside = self.inside(path)
        if inside in self._contents:
            data = self._contents[inside]
            if data is None:
                raise UserError(f"{path} is not in the checkout {self.root}")
            return data
        file = self.root / inside
        if not file.exists():
            raise UserError(f"{path} is not in the checkout {self.root}")
        if not file.is_file():
            raise UserError(f"{path} has to be a file; {file} is something else")
        try:
            return file.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; repair it, or its permissions") from error

    def read_if_there(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None where there is none. Raises as `read`."""
        return self.read(path) if self.exists(path) else None

    def list(self, path: str = ".") -> list[str]:
        """Return the paths of the files and folders directly in a folder, sorted; none where there is no such folder.

        What a link out of the checkout leads to, and `.git`, are left out.

        Raises:
            UserError: as `inside`, for the folder itself.
        """
        folder = PurePosixPath() if path in (".", "") else PurePosixPath(self.inside(path))
        where = self.root / folder
        names = {entry.name for entry in os.scandir(where)} if where.is_dir() else set()
        names |= {PurePosixPath(other).name for other in self._contents if PurePosixPath(other).parent == folder}
        return [child for name in sorted(names) if self._is_seen(child := (folder / name).as_posix())]

    def mode(self, path: str) -> int:
        """Return the permission bits of a file on disk. Raises as `inside`."""
        return stat.S_IMODE(self.locate(path).stat().st_mode)

    def _is_seen(self, path: str) -> bool:
        try:
            return self.exists(path)
        except UserError:
            return False
