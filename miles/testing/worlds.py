"""Groups of processes forked from this one, which never outlive their time limit."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch

GRACE_SECONDS = 2.0
"""After one rank has failed, how long the others get to say something too; most will wait for it in a collective."""


class WorldError(RuntimeError):
    """A rank raised, died, or did not finish in time; the message holds what each of them said."""


def run_world(function: Callable[[], Any], size: int, *, time_limit: float) -> list[Any]:
    """Return what `function()` returns on each of `size` CPU processes.

    Args:
        function: Runs on every rank, which finds its place in the environment as a torchrun process does. What it
            returns must be picklable, and tensors should be handed back as arrays.
        size: Number of ranks.
        time_limit: Seconds after which all of them are killed.

    Raises:
        WorldError: a rank raised, died or ran out of time. No process is left.
    """
    context = multiprocessing.get_context("fork")
    environment = _environment(size)
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(function, sender, {**environment, "RANK": str(rank)}))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return _collect(receivers, time_limit)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for receiver in receivers:
            receiver.close()


def _environment(size: int) -> dict[str, str]:
    if size == 1:
        return {}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _run_rank(function: Callable[[], Any], sender: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment, LOCAL_RANK=environment["RANK"])
    torch.set_num_threads(1)
    # The arithmetic is the same on a machine with GPUs, and a forked process could not use one that its parent has.
    with mock.patch("torch.cuda.is_available", lambda: False):
        try:
            sender.send((function(), ""))
        except BaseException:
            sender.send((None, traceback.format_exc()))


def _collect(receivers: list[Connection], time_limit: float) -> list[Any]:
    """Return the ranks' results, or raise with the reports of those that failed."""
    deadline = time.monotonic() + time_limit
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in [receiver for receiver in waiting if receiver in ready]:
            rank = waiting.pop(receiver)
            try:
                results[rank], error = receiver.recv()
            except EOFError:
                error = "the rank died without a word"
            if error:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if not errors and waiting:
        message = f"did not finish within {time_limit:g} s and was killed"
        errors = dict.fromkeys(waiting.values(), message)
    if errors:
        raise WorldError(
            "\n".join(f"rank {rank} of {len(receivers)}: {text}" for rank, text in sorted(errors.items()))
        )
    return [results[rank] for rank in range(len(receivers))]
