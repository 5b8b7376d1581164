"""What the training backends share: how one rollout's shard becomes optimizer steps and their metrics."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from miles.backends.experimental.fsdp_utils.models.gpt import GPT, GPTConfig
from miles.backends.training_utils import checkpoint
from miles.backends.training_utils.data import DataIterator, get_batch, get_data_iterator, move_to_device
from miles.backends.training_utils.finite_checks import refuse_non_finite_log_probs, refuse_non_finite_step
from miles.backends.training_utils.log_utils import log_rollout_data, log_train_step
from miles.backends.training_utils.loss import compute_advantages_and_returns
from miles.backends.training_utils.loss_hub.custom_correction import check_correction_signature
from miles.backends.training_utils.loss_hub.custom_reducer import probe_pg_loss_reducer
from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy
from miles.backends.training_utils.process_group import World
from miles.backends.training_utils.step_totals import is_left_empty, prepare_loss_terms, warn_of_empty_step
from miles.backends.training_utils.step_weights import describe_steps
from miles.utils.distributed_utils import all_gather_objects, on_every_rank, on_this_rank
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

ARCHITECTURE_ARGUMENTS = ("hidden_size", "num_layers", "num_attention_heads", "max_position_embeddings")


class TrainActor(abc.ABC):
    """The policy, its optimizer and, for the KL term, its reference, distributed over all processes by a backend.

    Attributes:
        start_rollout_id: The rollout to train next: 0, or where the loaded checkpoint stopped.
        num_steps_done: Optimizer steps behind the present weights.
        num_steps_skipped: Steps that were left out, since nothing was left of them.
        report: Told what is being done, for a person who watches.
    """

    def __init__(self, args: Options, world: World, *, vocab_size: int, pad_token_id: int) -> None:
        """Build the model from `args.seed`, or from the newest checkpoint of `args.load`; every rank calls this.

        Raises:
            UserError: a custom reducer breaks its contract, a checkpoint is damaged, missing (`--ref-load`) or of
                another architecture, `--save` cannot be written or names the folder of another run.
        """
        self.args = args
        self.world = world
        self.vocab_size = vocab_size
        self.pad_token_id = pad_token_id
        self.start_rollout_id = 0
        self.num_steps_done = 0
        self.num_steps_skipped = 0
        self.report: Callable[[str], None] = lambda phase: None
        self._replica: GPT | None = None
        on_every_rank(lambda: _probe_plug_ins(args))
        self._build()
        self._refuse_foreign_save_folder()
        self._load()
        self._schedule_learning_rate()
        self.has_reference = args.use_kl_loss
        if self.has_reference:
            self._build_reference(self._find_reference())

    # What a backend does in its own way.

    @abc.abstractmethod
    def _build(self) -> None:
        """Build the seeded model and its optimizer on all processes."""

    @abc.abstractmethod
    def _schedule_learning_rate(self) -> None:
        """Position the learning-rate schedule after `num_steps_done` optimizer steps."""

    @abc.abstractmethod
    def _build_reference(self, folder: Path | None) -> None:
        """Build the frozen reference from a checkpoint's folder, or from the weights that the seed draws."""

    @abc.abstractmethod
    def _compute_log_probs(
        self, iterators: list[DataIterator], num_microbatches: list[int], *, store_prefix: str
    ) -> dict[str, list[torch.Tensor]]:
        """Return the column `{store_prefix}log_probs` of the policy, or of the reference for the prefix "ref_".

        A rank that sees no logits returns nothing.
        """

    @abc.abstractmethod
    def _compute_gradients(
        self, iterators: list[DataIterator], num_microbatches: int
    ) -> tuple[dict[str, float], float]:
        """Run one step's micro-batches forward and backward; return its metrics and its gradient's global norm.

        Every rank gets the same numbers.
        """

    @abc.abstractmethod
    def _step(self) -> float:
        """Clip, make the optimizer step, advance the schedule; return the learning rate that was used."""

    @abc.abstractmethod
    def _gather_weights(self, replica: GPT) -> None:
        """Copy the policy's weights into a whole model; every rank calls this."""

    @abc.abstractmethod
    def _write_state(self, folder: Path) -> None:
        """Write model and optimizer under an existing folder; every rank calls this."""

    @abc.abstractmethod
    def _read_state(self, folder: Path) -> None:
        """Read what `_write_state` wrote."""

    def _sync_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the ranks that have them, on every rank."""
        return metrics

    # What is the same for all.

    def update_weights(self) -> GPT:
        """Return a whole copy of the policy, as rollout generation uses it; every rank calls this."""
        if self._replica is None:
            whole = build_seeded_gpt(self.args, self.vocab_size, self.world.device)
            self._replica = whole.requires_grad_(False).eval()
        self._gather_weights(self._replica)
        return self._replica

    def train(self, rollout_id: int, shard: RolloutBatch) -> Iterator[dict[str, float]]:
        """Train on one rollout; every rank calls this with its shard of the same rollout.

        Args:
            rollout_id: Number of the rollout.
            shard: This rank's rows, as `process_rollout_data_shard` returns them.

        Yields:
            The metrics of each optimizer step when it is made: `train/...` of the step and `rollout/...` of the
            rollout, the same on every rank.

        Raises:
            NonFiniteError: a log-prob at an active token, a loss or a gradient norm is NaN or infinite.
        """
        data = move_to_device(shard, self.world.device)
        iterators, num_microbatches = get_data_iterator(self.args, None, data)
        for wanted, store_prefix in ((self.has_reference, "ref_"), (needs_old_log_probs(self.args), "")):
            if wanted:
                _reset(iterators)
                data.update(self._compute_log_probs(iterators, num_microbatches, store_prefix=store_prefix))
        refuse_non_finite_log_probs(rollout_id, data)
        compute_advantages_and_returns(self.args, data)
        prepare_loss_terms(self.args, data, iterators, num_microbatches)
        described = self._describe_steps(data, iterators, num_microbatches)
        rollout_metrics = self._sync_metrics(log_rollout_data(rollout_id, self.args, data))
        _reset(iterators)
        for step_id, (total, facts) in enumerate(zip(num_microbatches, described, strict=True)):
            if self.world.rank == 0:
                warn_of_empty_step(self.args, rollout_id, step_id, facts)
            if is_left_empty(self.args, facts):
                step_metrics = self._skip_step(iterators, total, facts)
            else:
                loss_dict, grad_norm = on_this_rank(self._compute_gradients, iterators, total)
                refuse_non_finite_step(rollout_id, step_id, loss_dict, grad_norm)
                extra = {"lr-pg_0": self._step(), **facts}
                self.num_steps_done += 1
                step_metrics = log_train_step(
                    self.args, loss_dict, grad_norm, rollout_id, step_id, len(num_microbatches), extra_metrics=extra
                )
            # Steps are counted over the run: rollouts of ragged groups differ in their number of steps.
            step_metrics["train/step"] = self.num_steps_done + self.num_steps_skipped - 1
            yield {**step_metrics, **rollout_metrics}

    def _describe_steps(
        self, data: RolloutBatch, iterators: list[DataIterator], num_microbatches: list[int]
    ) -> list[dict[str, float]]:
        """Return `describe_steps` of the rollout, on every rank."""
        described = on_this_rank(describe_steps, self.args, data, iterators[0], num_microbatches)
        # Only the last pipeline stage knows what a correction left.
        return [self._sync_metrics(facts) for facts in described]

    def _skip_step(
        self, iterators: list[DataIterator], num_microbatches: int, facts: Mapping[str, float]
    ) -> dict[str, float]:
        """Leave a step out of which a mean cannot be taken; weights, optimizer and schedule stay as they are."""
        for iterator in iterators:
            iterator.skip(num_microbatches)
        self.num_steps_skipped += 1
        return {"train/skipped_steps": self.num_steps_skipped, **{f"train/{key}": x for key, x in facts.items()}}

    def save(self, rollout_id: int) -> Path:
        """Write a checkpoint that continues after `rollout_id`; every rank calls this. Returns its folder."""
        meta = {
            "rollout_id": rollout_id,
            "num_steps_done": self.num_steps_done,
            "num_steps_skipped": self.num_steps_skipped,
            "architecture": self.describe_architecture(),
        }
        folder = Path(str(self.args.save))
        return checkpoint.save_checkpoint(folder, self._write_state, meta=meta, iteration=rollout_id + 1)

    def describe_architecture(self) -> dict[str, int | str]:
        """Return, by name, what decides the shapes of the weights and how a checkpoint stores them."""
        return describe_architecture(self.args, self.vocab_size)

    def _next_batch(self, iterator: DataIterator) -> RolloutBatch:
        return get_batch(iterator, pad_token_id=self.pad_token_id, device=self.world.device)

    def _score(self, logits: torch.Tensor, batch: RolloutBatch) -> dict[str, list[torch.Tensor]]:
        """Return "log_probs" of a micro-batch's response tokens, per row."""
        return get_log_probs_and_entropy(
            logits,
            args=self.args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )

    def _load(self) -> None:
        """Continue from `args.load`; where that holds nothing yet, start from scratch: one command serves both."""
        if self.args.load is None:
            return
        folder = find_checkpoint(Path(self.args.load))
        if folder is None:
            logger.info("no checkpoint in %s (--load): starting from scratch", self.args.load)
            return
        meta = checkpoint.read_meta(folder, architecture=self.describe_architecture(), flag="--load")
        self._read_state(folder)
        self.start_rollout_id = meta["rollout_id"] + 1
        self.num_steps_done = meta["num_steps_done"]
        self.num_steps_skipped = meta.get("num_steps_skipped", 0)
        logger.info("continuing from %s: rollout %d is next", folder, self.start_rollout_id)

    def _refuse_foreign_save_folder(self) -> None:
        """Keep a run from mixing its checkpoints with those of another."""
        save, load = self.args.save, self.args.load
        if save is not None:
            on_every_rank(lambda: checkpoint.make_root(Path(save)))
        if save is None or (load and Path(load).resolve() == Path(save).resolve()):
            return
        if find_checkpoint(Path(save)) is not None:
            raise UserError(
                f"--save {save} holds the checkpoints of another run; continue that run with --load {save}, "
                "or save elsewhere"
            )

    def _find_reference(self) -> Path | None:
        if self.args.ref_load is None:
            return None
        folder = find_checkpoint(Path(self.args.ref_load))
        if folder is None:
            raise UserError(f"no checkpoint in {self.args.ref_load} (--ref-load); expected a folder that --save wrote")
        checkpoint.read_meta(folder, architecture=self.describe_architecture(), flag="--ref-load")
        return folder


def _probe_plug_ins(args: Options) -> None:
    probe_pg_loss_reducer(args)
    check_correction_signature(args)


def build_seeded_gpt(args: Options, vocab_size: int, device: torch.device) -> GPT:
    """Return the whole model with the weights that `args.seed` draws, the same on every process."""
    config = GPTConfig(vocab_size=vocab_size, **{name: getattr(args, name) for name in ARCHITECTURE_ARGUMENTS})
    return GPT(config, seed=args.seed).to(device)


def describe_architecture(args: Options, vocab_size: int) -> dict[str, int | str]:
    """Return, by name, the backend and the numbers that decide the shapes of the weights."""
    sizes = {name: getattr(args, name) for name in ARCHITECTURE_ARGUMENTS}
    return {"train_backend": args.train_backend, **sizes, "vocab_size": vocab_size}


def needs_old_log_probs(args: Options) -> bool:
    """Whether training compares with the policy's own log-probs from before the rollout's first step.

    SFT has no old policy; with `--use-rollout-logprobs` the rollout's log-probs take that part, unless the mismatch
    between both is to be measured or corrected.
    """
    if args.loss_type == "sft_loss":
        return False
    return not args.use_rollout_logprobs or args.use_tis or args.get_mismatch_metrics


def find_checkpoint(root: Path) -> Path | None:
    """Return what rank 0 finds by `find_latest_checkpoint`, so that all ranks start alike; every rank calls this."""
    return all_gather_objects(on_every_rank(lambda: checkpoint.find_latest_checkpoint(root)))[0]


def _reset(iterators: list[DataIterator]) -> None:
    for iterator in iterators:
        iterator.reset()
