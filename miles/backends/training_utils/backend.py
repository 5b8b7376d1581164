"""Which backend trains: its world, and the class of its actor. Each is imported only where it is chosen."""

from collections.abc import Iterator
from contextlib import contextmanager

from miles.backends.training_utils.process_group import World
from miles.backends.training_utils.train_actor import TrainActor
from miles.utils.options import Options


@contextmanager
def open_backend(args: Options) -> Iterator[tuple[World, type[TrainActor]]]:
    """Open the process group and the parallel axes of `args.train_backend`, and close them on the way out.

    Yields:
        This process's place in the run, and the actor class to train with.

    Raises:
        UserError: the processes do not fit the machine or the parallel sizes, or the backend is not installed.
    """
    if args.train_backend == "megatron":
        from miles.backends.megatron_utils.availability import check_megatron, quiet_import

        check_megatron()
        with quiet_import():
            from miles.backends.megatron_utils.actor import MegatronTrainActor
            from miles.backends.megatron_utils.parallel import megatron_world

        with megatron_world(args) as world:
            yield world, MegatronTrainActor
    else:
        from miles.backends.experimental.fsdp_utils.actor import FSDPTrainActor
        from miles.backends.experimental.fsdp_utils.parallel import fsdp_world

        with fsdp_world() as world:
            yield world, FSDPTrainActor
