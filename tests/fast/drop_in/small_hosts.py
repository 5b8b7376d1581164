"""The small hosts: copies to apply the tool to, and processes to run them in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HOSTS = {"one": "miles", "two": "slime"}
"""Folder of each small host, and the package in it."""


def copy_host(name: str, target: Path) -> Path:
    """Copy a small host to the folder `target`."""
    return Path(shutil.copytree(HERE / "hosts" / name, target, ignore=shutil.ignore_patterns("__pycache__")))


def run_host(name: str, folder: Path, cases: list[dict[str, Any]], *, dp: int = 1, cp: int = 1) -> list[Any]:
    """Run cases with a copy of a small host, in dp * cp processes that talk over gloo; all have the same results."""
    world = Path(tempfile.mkdtemp(dir=folder.parent))
    (world / "request.json").write_text(json.dumps(cases))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(HERE / "host_driver.py"), name, str(dp), str(cp), str(world)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(dp * cp):
            output = stack.enter_context((world / f"output-{rank}").open("w"))
            processes.append(
                subprocess.Popen([*arguments, str(rank)], env=environment, cwd=folder, stdout=output, stderr=output)
            )
            stack.callback(processes[-1].kill)
        for rank, process in enumerate(processes):
            assert process.wait(timeout=300) == 0, (world / f"output-{rank}").read_text()
    return json.loads((world / "result.json").read_text())
