"""The story of a run: sample a rollout, convert it, train on it, keep what it taught."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

from miles.backends.training_utils.backend import open_backend
from miles.backends.training_utils.finite_checks import refuse_non_finite_samples
from miles.backends.training_utils.parallel import GroupInfo, get_parallel_state
from miles.backends.training_utils.process_group import World
from miles.backends.training_utils.train_actor import TrainActor
from miles.ray.rollout.train_data_conversion import (
    convert_samples_to_train_data,
    process_rollout_data_shard,
    split_train_data_by_dp,
    validate_train_data,
)
from miles.rollout.data_source import DataSource, build_data_source
from miles.rollout.debug_data import load_rollout_dump, save_rollout_dump
from miles.rollout.generate import gather_rollouts
from miles.rollout.tokenizer import Tokenizer, get_tokenizer
from miles.utils.distributed_utils import all_gather_objects, on_every_rank
from miles.utils.errors import UserError
from miles.utils.misc import load_function
from miles.utils.number_lists import smallest_and_largest
from miles.utils.options import Options
from miles.utils.run_files import LOG_NAME, file_logging, make_output_dir, write_arguments
from miles.utils.run_recorder import RunRecorder, SilentRecorder
from miles.utils.types import RolloutBatch, Sample

DEFAULT_ROLLOUT_FUNCTION = "miles.rollout.generate.generate_rollout"
SFT_ROLLOUT_FUNCTION = "miles.rollout.sft_rollout.generate_rollout"

logger = logging.getLogger(__name__)


def train(args: Options, *, on_closing: Callable[[], None] = lambda: None) -> None:
    """Train as `args` says, on this process's share of the run.

    Args:
        args: The resolved namespace of `parse_args`.
        on_closing: Called when training has ended, well or not, before anything is tidied up.

    Raises:
        UserError: something that a person has to fix, on every rank alike.
        NonFiniteError: training diverged.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        world, make_actor = stack.enter_context(open_backend(args))
        directory = open_output_dir(args, world)
        log = nullcontext() if world.rank else file_logging(directory / LOG_NAME)
        on_every_rank(lambda: stack.enter_context(log))
        tokenizer = get_tokenizer(args)
        data_source = on_every_rank(lambda: open_data_source(args, tokenizer))
        actor = make_actor(args, world, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
        recorder = stack.enter_context(
            on_every_rank(lambda: make_recorder(args, world, directory, actor.start_rollout_id, started=started))
        )
        actor.report = recorder.report
        try:
            for rollout_id in range(actor.start_rollout_id, args.num_rollout):
                train_on_rollout(rollout_id, args, actor, data_source, tokenizer, recorder)
        finally:
            on_closing()


def train_on_rollout(
    rollout_id: int,
    args: Options,
    actor: TrainActor,
    data_source: DataSource | None,
    tokenizer: Tokenizer,
    recorder: SilentRecorder,
) -> None:
    """Run one rollout: samples, train data, this rank's shard, optimizer steps, checkpoint."""
    recorder.report("rollout")
    recorder.start_rollout()
    samples = get_rollout(rollout_id, args, actor, data_source, tokenizer)
    shard = on_every_rank(
        lambda: make_shard(args, samples, get_parallel_state().intra_dp, vocab_size=tokenizer.vocab_size)
    )
    recorder.start_training()
    for metrics in actor.train(rollout_id, shard):
        recorder.record(rollout_id, metrics)
    checkpoint = None
    if is_save_due(args, rollout_id):
        recorder.report("checkpoint")
        checkpoint = actor.save(rollout_id)
    recorder.end_rollout(rollout_id, checkpoint)


def open_output_dir(args: Options, world: World) -> Path:
    """Let rank 0 make the run's folder and write the arguments there; return the folder on every rank.

    Raises:
        UserError: the folder cannot be written.
    """

    def open_on_rank_0() -> Path | None:
        if world.rank != 0:
            return None
        directory = make_output_dir(args, now=time.time())
        write_arguments(directory, args)
        return directory

    return all_gather_objects(on_every_rank(open_on_rank_0))[0]


def make_recorder(
    args: Options, world: World, directory: Path, first_rollout_id: int, *, started: float
) -> SilentRecorder:
    """Return what tells a person, the metrics and the trackers of the run: rank 0's; that of the others is silent."""
    if world.rank != 0:
        return SilentRecorder()
    return RunRecorder(args, directory, first_rollout_id=first_rollout_id, started=started)


def open_data_source(args: Options, tokenizer: Tokenizer) -> DataSource | None:
    """Return where prompts come from, None where whole rollouts are read from a dump."""
    return build_data_source(args, tokenizer) if args.load_debug_rollout_data is None else None


def get_rollout(
    rollout_id: int, args: Options, actor: TrainActor, data_source: DataSource | None, tokenizer: Tokenizer
) -> list[Sample]:
    """Return all samples of a rollout, the same on every rank: read from a dump, or sampled from the policy.

    Raises:
        UserError: the dump cannot be used, or a rollout or reward function returned something wrong.
        NonFiniteError: the policy has diverged.
    """
    source, target = args.load_debug_rollout_data, args.save_debug_rollout_data
    if source is not None:
        samples = on_every_rank(lambda: load_rollout_dump(source, rollout_id))
    else:
        default = SFT_ROLLOUT_FUNCTION if args.loss_type == "sft_loss" else DEFAULT_ROLLOUT_FUNCTION
        samples = gather_rollouts(
            args,
            rollout_id,
            data_source,
            actor.update_weights(),
            tokenizer,
            device=actor.world.device,
            rollout_function=load_function(args.rollout_function_path or default),
        )
        if args.rollout_function_path is None:
            refuse_non_finite_samples(rollout_id, samples)
    if target is not None:
        on_every_rank(lambda: save_rollout_dump(target, rollout_id, samples) if actor.world.rank == 0 else None)
    return samples


def make_shard(args: Options, samples: list[Sample], dp: GroupInfo, *, vocab_size: int) -> RolloutBatch:
    """Convert a rollout's samples and return the rows that this data-parallel rank trains on.

    Raises:
        UserError: a sample or a batch size that cannot be trained on.
    """
    custom_convert = args.custom_convert_samples_to_train_data_path
    custom_rewards = args.custom_reward_post_process_path
    data = convert_samples_to_train_data(
        args,
        samples,
        {},
        load_function(custom_convert) if custom_convert else None,
        load_function(custom_rewards) if custom_rewards else None,
    )
    validate_train_data(args, data, dp_size=dp.size)
    check_rows_fit_model(args, data["tokens"], vocab_size=vocab_size)
    shards = split_train_data_by_dp(args, data, dp.size)
    return process_rollout_data_shard(args, shards[dp.rank])


def check_rows_fit_model(args: Options, rows: list[list[int]], *, vocab_size: int) -> None:
    """Check that every row is within the model's positions, and its tokens within the vocabulary.

    Raises:
        UserError: naming the first row that is not.
    """
    for index, tokens in enumerate(rows):
        if len(tokens) > args.max_position_embeddings:
            longest = max(map(len, rows))
            raise UserError(
                f"sample {index} has {len(tokens)} tokens, more than the model's {args.max_position_embeddings} "
                f"positions; raise --max-position-embeddings to at least {longest}"
            )
        smallest, largest = smallest_and_largest(tokens)
        if smallest < 0 or largest >= vocab_size:
            raise UserError(
                f"sample {index} has token ids from {smallest} to {largest}; allowed are 0 to "
                f"{vocab_size - 1}, the vocabulary of --tokenizer-type"
            )


def is_save_due(args: Options, rollout_id: int) -> bool:
    """Whether a checkpoint is written after this rollout: each `save_interval` rollouts, and after the last."""
    if args.save is None:
        return False
    is_last = rollout_id + 1 == args.num_rollout
    return is_last or (args.save_interval is not None and (rollout_id + 1) % args.save_interval == 0)
