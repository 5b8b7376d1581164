"""Forks the ranks of a world, runs plans on them, and hands back what rank 0 saw."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist
from host import Host
from step import Outcome, Plan, run_rank

TIMEOUT = timedelta(seconds=120)


class RankError(Exception):
    """A rank raised; the text is its traceback."""


def run(host: Host, plans: Sequence[Plan]) -> list[Outcome | RankError]:
    """Run plans of one backend and shape in one world, one after the other.

    A plan that raises (on every rank, as a check of arguments or data does) leaves the world usable; one that raises
    on some ranks only ends it, and the plans after it have that error.
    """
    (shape,) = {(plan.backend, plan.dp_size, plan.cp_size) for plan in plans}
    size = shape[1] * shape[2]
    fork = multiprocessing.get_context("fork")
    ends = [fork.Pipe() for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=_rank, args=(host, plans, rank, size, f"{folder}/store", ends[rank][1]))
            for rank in range(size)
        ]
        for process, (_, far_end) in zip(ranks, ends, strict=True):
            process.start()
            far_end.close()  # so that a rank that dies is seen at once
        try:
            return _collect([end for end, _ in ends], len(plans))
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(ends: list[Connection], num_plans: int) -> list[Outcome | RankError]:
    found: list[Outcome | RankError] = []
    while len(found) < num_plans:
        answers = [_answer(end) for end in ends]
        errors = [answer for answer in answers if isinstance(answer, RankError)]
        if errors and len(errors) < len(answers):
            return found + [errors[0]] * (num_plans - len(found))
        found.append(answers[0])
    return found


def _answer(end: Connection) -> Outcome | RankError:
    try:
        return end.recv() if end.poll(TIMEOUT.total_seconds()) else RankError("a rank did not answer")
    except EOFError:
        return RankError("a rank died")


def _rank(host: Host, plans: Sequence[Plan], rank: int, size: int, store: str, answers: Connection) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=TIMEOUT)
    _open_axes(plans[0])
    for plan in plans:
        try:
            answers.send(run_rank(host, plan))
        except (Exception, SystemExit):
            answers.send(RankError(traceback.format_exc()))


def _open_axes(plan: Plan) -> None:
    """Megatron's axes: for its backend, and because the hosts' log-probabilities take its tensor-parallel group."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=plan.cp_size)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
