"""The FSDP2 training actor: one rollout's shard in, optimizer steps and their metrics out."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from miles.backends.experimental.fsdp_utils import checkpoint
from miles.backends.experimental.fsdp_utils.model import (
    build_model,
    check_gradients_are_averaged,
    copy_full_weights,
    describe_architecture,
    shard_model,
)
from miles.backends.experimental.fsdp_utils.models.gpt import GPT
from miles.backends.experimental.fsdp_utils.optimizer import build_lr_scheduler, build_optimizer
from miles.backends.experimental.fsdp_utils.parallel import FSDPWorld
from miles.backends.training_utils.data import (
    DataIterator,
    get_batch,
    get_data_iterator,
    move_to_device,
)
from miles.backends.training_utils.log_utils import (
    aggregate_forward_results,
    aggregate_train_losses,
    log_rollout_data,
    log_train_step,
)
from miles.backends.training_utils.loss import compute_advantages_and_returns, loss_function
from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy
from miles.utils.distributed_utils import all_gather_objects, on_every_rank
from miles.utils.errors import UserError
from miles.utils.finite_checks import refuse_non_finite_log_probs, refuse_non_finite_step
from miles.utils.types import RolloutBatch

logger = logging.getLogger(__name__)


class FSDPTrainActor:
    """The policy, its optimizer and, for the KL term, its reference, each sharded over all processes.

    Attributes:
        start_rollout_id: The rollout to train next: 0, or where the loaded checkpoint stopped.
        num_steps_done: Optimizer steps behind the present weights.
    """

    def __init__(self, args: Namespace, world: FSDPWorld, *, vocab_size: int, pad_token_id: int) -> None:
        """Build the model from `args.seed`, or from the newest checkpoint of `args.load`; every rank calls this.

        Raises:
            UserError: a checkpoint is damaged, missing (`--ref-load`) or of another architecture, `--save` names the
                folder of another run, or this torch cannot average gradients here.
        """
        self.args = args
        self.world = world
        self.vocab_size = vocab_size
        self.pad_token_id = pad_token_id
        self.architecture = describe_architecture(args, vocab_size)
        self.start_rollout_id = 0
        self.num_steps_done = 0
        self.report: Callable[[str], None] = lambda phase: None
        self.replica: GPT | None = None
        check_gradients_are_averaged(world)
        self.model = shard_model(build_model(args, vocab_size, world.device), world)
        self.optimizer = build_optimizer(args, self.model)
        self._refuse_foreign_save_folder()
        self._load()
        self.scheduler = build_lr_scheduler(args, self.optimizer, num_steps_done=self.num_steps_done)
        self.reference = self._build_reference() if args.use_kl_loss else None

    def update_weights(self) -> GPT:
        """Return an unsharded copy of the policy, as rollout generation uses it; every rank calls this."""
        if self.replica is None:
            self.replica = build_model(self.args, self.vocab_size, self.world.device).requires_grad_(False).eval()
        copy_full_weights(self.model, self.replica)
        return self.replica

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
        (iterator, *_), num_microbatches = get_data_iterator(self.args, self.model, data)
        if self.reference is not None:
            data.update(self._compute_log_probs(self.reference, iterator, store_prefix="ref_"))
        if needs_old_log_probs(self.args):
            data.update(self._compute_log_probs(self.model, iterator, store_prefix=""))
        refuse_non_finite_log_probs(rollout_id, data)
        compute_advantages_and_returns(self.args, data)
        rollout_metrics = log_rollout_data(rollout_id, self.args, data)
        iterator.reset()
        for step_id in range(len(num_microbatches)):
            step_metrics = self._train_step(rollout_id, step_id, iterator, num_microbatches)
            yield {**step_metrics, **rollout_metrics}

    def save(self, rollout_id: int) -> Path:
        """Write a checkpoint that continues after `rollout_id`; every rank calls this. Returns its folder."""
        meta = {
            "rollout_id": rollout_id,
            "num_steps_done": self.num_steps_done,
            "architecture": self.architecture,
        }
        return checkpoint.save_checkpoint(
            Path(self.args.save), self.model, self.optimizer, meta=meta, iteration=rollout_id + 1
        )

    def _next_batch(self, iterator: DataIterator) -> RolloutBatch:
        return get_batch(iterator, pad_token_id=self.pad_token_id, device=self.world.device)

    @torch.no_grad()
    def _compute_log_probs(
        self, model: GPT, iterator: DataIterator, *, store_prefix: str
    ) -> dict[str, list[torch.Tensor]]:
        """Return the column `{store_prefix}log_probs`: what `model` gives each response token, per row."""
        iterator.reset()
        results = []
        total = len(iterator.micro_batch_indices)
        for index in range(total):
            self.report(f"{store_prefix}log-probs {index + 1}/{total}")
            batch = self._next_batch(iterator)
            result = get_log_probs_and_entropy(
                compute_logits(model, batch),
                args=self.args,
                unconcat_tokens=batch["unconcat_tokens"],
                total_lengths=batch["total_lengths"],
                response_lengths=batch["response_lengths"],
            )
            results.append({"log_probs": result["log_probs"]})
        return aggregate_forward_results(results, iterator, self.args, store_prefix)

    def _train_step(
        self, rollout_id: int, step_id: int, iterator: DataIterator, num_microbatches: list[int]
    ) -> dict[str, float]:
        """Make one optimizer step and return its metrics."""
        self.optimizer.zero_grad(set_to_none=True)
        losses, total = [], num_microbatches[step_id]
        for index in range(total):
            self.report(f"micro-batch {index + 1}/{total}")
            # Gradients add up unsharded and cross the processes once a step: the same sum with fewer messages.
            self.model.set_requires_gradient_sync(index == total - 1)
            batch = self._next_batch(iterator)
            loss, _, log_dict = loss_function(self.args, batch, total, compute_logits(self.model, batch))
            loss.backward()
            losses.append(log_dict)
        loss_dict = aggregate_train_losses(losses)
        grad_norm = self._clip_gradients()
        refuse_non_finite_step(rollout_id, step_id, loss_dict, grad_norm)
        learning_rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.num_steps_done += 1
        extra = {"lr-pg_0": learning_rate, "num_tokens": batch["step_counts"].num_tokens}
        return log_train_step(
            self.args, loss_dict, grad_norm, rollout_id, step_id, len(num_microbatches), extra_metrics=extra
        )

    def _clip_gradients(self) -> float:
        """Scale the gradient to a norm of at most `clip_grad` (0: leave it) and return its norm before that."""
        limit = self.args.clip_grad or float("inf")
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).full_tensor().item()

    def _load(self) -> None:
        """Continue from `args.load`; where that holds nothing yet, start from scratch: one command serves both."""
        if self.args.load is None:
            return
        folder = find_checkpoint(Path(self.args.load))
        if folder is None:
            logger.info("no checkpoint in %s (--load): starting from scratch", self.args.load)
            return
        meta = checkpoint.read_meta(folder, architecture=self.architecture, flag="--load")
        checkpoint.load_model(folder, self.model, flag="--load")
        checkpoint.load_optimizer(folder, self.model, self.optimizer, flag="--load")
        self.start_rollout_id = meta["rollout_id"] + 1
        self.num_steps_done = meta["num_steps_done"]
        logger.info("continuing from %s: rollout %d is next", folder, self.start_rollout_id)

    def _refuse_foreign_save_folder(self) -> None:
        """Keep a run from mixing its checkpoints with those of another."""
        if self.args.save is None or (
            self.args.load and Path(self.args.load).resolve() == Path(self.args.save).resolve()
        ):
            return
        if find_checkpoint(Path(self.args.save)) is not None:
            raise UserError(
                f"--save {self.args.save} holds the checkpoints of another run; continue that run with "
                f"--load {self.args.save}, or save elsewhere"
            )

    def _build_reference(self) -> GPT:
        """Return the frozen reference: `--ref-load`'s weights, else those that the seed draws, resumed or not."""
        model = shard_model(
            build_model(self.args, self.vocab_size, self.world.device).requires_grad_(False), self.world
        )
        if self.args.ref_load is not None:
            folder = find_checkpoint(Path(self.args.ref_load))
            if folder is None:
                raise UserError(
                    f"no checkpoint in {self.args.ref_load} (--ref-load); expected a folder that --save wrote"
                )
            checkpoint.read_meta(folder, architecture=self.architecture, flag="--ref-load")
            checkpoint.load_model(folder, model, flag="--ref-load")
        return model.eval()


def compute_logits(model: GPT, batch: RolloutBatch) -> torch.Tensor:
    """Run the model on a packed micro-batch; `[1, T, V]`."""
    return model(batch["tokens"], batch["position_ids"], batch["cu_seqlens"], batch["max_seqlen"])


def find_checkpoint(root: Path) -> Path | None:
    """Return what rank 0 finds by `find_latest_checkpoint`, so that all ranks start alike; every rank calls this."""
    return all_gather_objects(on_every_rank(lambda: checkpoint.find_latest_checkpoint(root)))[0]


def needs_old_log_probs(args: Namespace) -> bool:
    """Whether training compares with the policy's own log-probs from before the rollout's first step.

    SFT has no old policy; with `--use-rollout-logprobs` the rollout's log-probs take that part, unless the mismatch
    between both is to be measured or corrected.
    """
    if args.loss_type == "sft_loss":
        return False
    return not args.use_rollout_logprobs or args.use_tis or args.get_mismatch_metrics
