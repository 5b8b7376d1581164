"""Run a function on several ranks: processes forked from this one, which has torch imported already."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

TIME_LIMIT_SECONDS = 60

# FSDP2 imports it on first use; here it is imported once, and not once in each fork.
assert torch._dynamo


def run_ranks(function: Callable[[], Any], world_size: int, **options: Any) -> list[Any]:
    """Return what `function()` returns on each of `world_size` ranks; fail with the tracebacks where one raises."""
    outcomes = run_ranks_to_outcomes(function, world_size, **options)
    errors = [f"rank {rank}:\n{text}" for rank, (_, _, text) in enumerate(outcomes) if text]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)
    return [value for value, _, _ in outcomes]


def run_ranks_to_errors(function: Callable[[], Any], world_size: int, **options: Any) -> list[BaseException | None]:
    """Return the exception that `function()` raised on each rank, None where it raised none."""
    return [error for _, error, _ in run_ranks_to_outcomes(function, world_size, **options)]


def run_ranks_to_outcomes(
    function: Callable[[], Any], world_size: int, *, time_limit: float = TIME_LIMIT_SECONDS
) -> list[tuple[Any, BaseException | None, str]]:
    """Return (value, exception, traceback) of each rank; ranks that outlast the limit are killed, and the test fails.

    The ranks find each other as torchrun's processes do, through the environment. One rank is a group of one, which
    needs no environment.
    """
    context = multiprocessing.get_context("fork")
    environment = _launcher_environment(world_size)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(function, sender, {**environment, "RANK": str(rank)}))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    deadline = time.monotonic() + time_limit
    try:
        return [_receive(pipe, deadline) for pipe in pipes]
    finally:
        for process in processes:
            process.join(timeout=max(0.1, deadline - time.monotonic()))
            process.kill()
            process.join()


def run_forked(
    function: Callable[[], int],
    directory: Path,
    *,
    meanwhile: Callable[[Any], None] = lambda process: None,
    time_limit: float = TIME_LIMIT_SECONDS,
) -> tuple[int | None, str, str]:
    """Run `sys.exit(function())` in a forked process, and kill that where it outlasts the limit.

    Args:
        function: What the process does.
        directory: Where its output is kept.
        meanwhile: Called with the process when it has started.
        time_limit: Seconds.

    Returns:
        Exit status (negative: the signal that ended it), standard output and standard error.
    """
    stdout, stderr = directory / "out", directory / "err"

    def run() -> None:
        for path, descriptor in ((stdout, 1), (stderr, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        # pytest has replaced both streams; what the function prints belongs in the files.
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        raise SystemExit(function())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        meanwhile(process)
        process.join(timeout=time_limit)
    finally:
        process.kill()
        process.join()
    return process.exitcode, stdout.read_text(), stderr.read_text()


def _launcher_environment(world_size: int) -> dict[str, str]:
    if world_size == 1:
        return {}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _run_rank(function: Callable[[], Any], sender: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment, LOCAL_RANK=environment["RANK"])
    torch.set_num_threads(1)
    try:
        sender.send((function(), None, ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            sender.send((None, error, text))
        except Exception:  # not every exception can be pickled; pytest's own cannot
            sender.send((None, RuntimeError(str(error)), text))


def _receive(pipe: Any, deadline: float) -> tuple[Any, BaseException | None, str]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return None, TimeoutError(), "the rank did not finish in time"
    try:
        return pipe.recv()
    except EOFError as error:
        return None, error, "the rank died without a word"
