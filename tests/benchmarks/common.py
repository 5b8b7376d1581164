"""What every benchmark shares: the environment's line, interleaved medians, peak memory, a table and a JSON file.

All competitors of a benchmark run in one process, in turns, so that a busy machine slows each of them alike; quote
ratios of one run, not times of several.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TURN_SECONDS = 0.01

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def positive(text: str) -> int:
    """Read a count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _new_file(text: str) -> str:
    """Read a file's name, before hours of work are lost for want of a folder."""
    folder = os.path.dirname(text) or "."
    if os.path.isdir(text) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file in a folder that can be written, got {text!r}")
    return text


def parser(docstring: str, *, rounds: int | None = None, has_clock: bool = False) -> argparse.ArgumentParser:
    """Return the options of a benchmark.

    Args:
        docstring: The module's; what stands before its command describes it.
        rounds: Turns of each competitor by default; None where there are no turns.
        has_clock: Whether the clock of its times may be chosen.
    """
    options = argparse.ArgumentParser(description=docstring.split("`")[0])
    options.add_argument("--threads", type=positive, default=2, help="threads of torch (default: 2)")
    if rounds is not None:
        options.add_argument("--rounds", type=positive, default=rounds, help=f"turns of each (default: {rounds})")
    if has_clock:
        help_text = "cpu, with one thread: what a busy machine does not distort"
        options.add_argument("--clock", choices=CLOCKS, default="wall", help=help_text)
    options.add_argument("--json", type=_new_file, metavar="FILE", help="also write the results to this file")
    return options


def environment() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }


def interleaved(competitors: dict[str, Callable[[], Any]], rounds: int, clock: str = "wall") -> dict[str, list[float]]:
    """Return the seconds that a call of each competitor takes in each turn, after one turn that is not counted.

    A turn is as many calls as take `TURN_SECONDS`, after one that is not counted, so that what another competitor left
    in the caches does not count.
    """
    now = CLOCKS[clock]
    calls = dict.fromkeys(competitors, 1)
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for turn in range(rounds + 1):
        for name, run in competitors.items():
            run()
            start = now()
            for _ in range(calls[name]):
                run()
            taken = (now() - start) / calls[name]
            if turn:
                seconds[name].append(taken)
            else:
                calls[name] = max(1, math.ceil(TURN_SECONDS / max(taken, 1e-9)))
    return seconds


def time_rows(seconds: dict[str, list[float]], *, ours: str, **fields: Any) -> list[dict[str, Any]]:
    """Return a table row for each competitor: median and least milliseconds, and their ratios to ours."""
    median = {name: statistics.median(turns) for name, turns in seconds.items()}
    least = {name: min(turns) for name, turns in seconds.items()}
    return [
        {
            **fields,
            "competitor": name,
            "median ms": median[name] * 1e3,
            "/ ours": median[name] / median[ours],
            "least ms": least[name] * 1e3,
            "least / ours": least[name] / least[ours],
        }
        for name in seconds
    ]


class Stages:
    """The CPU seconds of stages that follow each other, each run once; a busy machine disturbs them little.

    Attributes:
        seconds: By name, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Do the work and return its result."""
        start = time.process_time()
        result = work()
        self.seconds[name] = time.process_time() - start
        return result


class PeakStorage(TorchDispatchMode):
    """Counts the bytes of the storages that operations return while the mode is on, and the most alive at a time.

    It sees what autograd's backward allocates too, and repeats exactly; what an operation allocates inside itself and
    frees before it returns stays out of sight.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._known:
                    self._live[reference.cdata] = (reference, storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def report(title: str, tables: dict[str, Sequence[dict[str, Any]]], json_file: str | None) -> None:
    """Print the environment and the tables, and write both to the JSON file if one is named."""
    header = {"benchmark": title, **environment()}
    print("  ".join(f"{key}={value}" for key, value in header.items()))
    for name, rows in tables.items():
        print(f"\n{name}")
        cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if json_file:
        with open(json_file, "w") as file:
            json.dump({"environment": header, "tables": tables}, file, indent=1)


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}" if isinstance(value, float) else str(value)
    )
