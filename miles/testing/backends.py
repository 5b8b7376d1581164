"""The real backends behind one call: run these steps under these splits, each on as many processes as it needs."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch._dynamo  # FSDP2 imports it on first use: here once, and not once in each forked process

from miles.testing.step import Outcome, Split, Step
from miles.testing.train_data import make_args, make_shards
from miles.testing.worlds import run_world
from miles.utils.distributed_utils import all_gather_objects

Job = tuple[Step, Split]


class Backend(Protocol):
    """Something that runs an optimizer step on several ranks."""

    def run(self, step: Step, split: Split) -> Outcome:
        """Run the step, split as `split` says."""
        ...

    def run_many(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run several; splits of one topology may share their processes."""
        ...


class TrainBackend(abc.ABC):
    """One of `train.py`'s backends on forked CPU processes: its world, its actor, its schedules and reductions.

    Args:
        options: More options of `train.py`, such as `("--use-distributed-optimizer",)`.
        time_limit: Seconds after which a group of processes is killed, and `WorldError` raised.
    """

    name = ""

    def __init__(self, *options: str, time_limit: float = 120.0) -> None:
        self.options = ("--train-backend", self.name, *options)
        self.time_limit = time_limit

    def __str__(self) -> str:
        return " ".join(self.options[1:])

    def run(self, step: Step, split: Split) -> Outcome:
        """Run the step, split as `split` says.

        Raises:
            UserError: a step, or a split, that the backend refuses.
            WorldError: a rank failed, or the time limit was reached.
        """
        return self.run_many([(step, split)])[0]

    def run_many(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run every (step, split); those of one topology run one after another in one group of processes."""
        from miles.testing.rank import run_jobs_on_rank

        outcomes: dict[int, Outcome] = {}
        for topology in dict.fromkeys(split.topology for _, split in jobs):
            chosen = [index for index, (_, split) in enumerate(jobs) if split.topology == topology]
            prepared = [self._prepare(*jobs[index]) for index in chosen]
            run = partial(run_jobs_on_rank, prepared, self.gather_gradient)
            ranks = run_world(run, jobs[chosen[0]][1].num_ranks, time_limit=self.time_limit)
            for index, *of_each_rank in zip(chosen, *ranks, strict=True):
                outcomes[index] = _agreed([Outcome(value, _tensors(grad), m) for value, grad, m in of_each_rank])
        return [outcomes[index] for index in range(len(jobs))]

    def _prepare(self, step: Step, split: Split) -> tuple[Any, list[dict[str, Any]]]:
        args = make_args(step, split, backend_options=self.options)
        return args, make_shards(args, step, split)

    @staticmethod
    @abc.abstractmethod
    def gather_gradient(actor: Any) -> dict[str, torch.Tensor]:
        """Return the whole gradient by `GPT` name from the actor of a step just computed; every rank calls this."""


class FSDPBackend(TrainBackend):
    """FSDP2: data parallel only."""

    name = "fsdp"

    @staticmethod
    def gather_gradient(actor: Any) -> dict[str, torch.Tensor]:
        """Return each gradient whole; its shards are the ranks' slices of its first dimension, in order."""
        local = {name: parameter.grad.to_local().numpy() for name, parameter in actor.model.named_parameters()}
        # One exchange of everything: a collective for each parameter takes longer than the step itself.
        shards = all_gather_objects(local)
        return {name: torch.cat([torch.from_numpy(shard[name]) for shard in shards]) for name in local}


class MegatronBackend(TrainBackend):
    """Megatron-Core: its schedules, data-parallel wrapper and gradient finalization, on every axis.

    Raises:
        UserError: megatron-core is not installed, or of a version that was not tested.
    """

    name = "megatron"

    def __init__(self, *options: str, time_limit: float = 120.0) -> None:
        from miles.backends.megatron_utils.availability import check_megatron, quiet_import

        check_megatron()
        super().__init__(*options, time_limit=time_limit)
        # Imported once, here, and not once in each forked process.
        with quiet_import():
            import miles.backends.megatron_utils.actor
            import miles.backends.megatron_utils.cpu  # noqa: F401

    @staticmethod
    def gather_gradient(actor: Any) -> dict[str, torch.Tensor]:
        """Return Megatron's gradient buffers as the package's `GPT` would have them."""
        from miles.testing.megatron_gradient import gather_megatron_gradient

        return gather_megatron_gradient(actor)


def _tensors(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).double() for name, array in arrays.items()}


def _agreed(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what all ranks report or, where one reports something else than the first, what that one does."""
    first = outcomes[0]
    return next((other for other in outcomes[1:] if not _is_same(other, first)), first)


def _is_same(one: Outcome, other: Outcome) -> bool:
    close = all(
        torch.allclose(part, other.gradient[name], rtol=1e-5, atol=1e-6) for name, part in one.gradient.items()
    )
    return close and one.metrics == other.metrics
