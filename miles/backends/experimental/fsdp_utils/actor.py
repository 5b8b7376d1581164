"""The FSDP2 training actor: parameters, gradients and optimizer state sharded over the data-parallel mesh."""

from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from miles.backends.experimental.fsdp_utils import checkpoint
from miles.backends.experimental.fsdp_utils.model import (
    check_gradients_are_averaged,
    copy_full_weights,
    gather_whole,
    shard_model,
)
from miles.backends.experimental.fsdp_utils.models.gpt import GPT
from miles.backends.experimental.fsdp_utils.optimizer import build_lr_scheduler, build_optimizer
from miles.backends.experimental.fsdp_utils.parallel import FSDPWorld
from miles.backends.training_utils.data import DataIterator
from miles.backends.training_utils.log_utils import aggregate_forward_results, aggregate_train_losses
from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.train_actor import TrainActor, build_seeded_gpt
from miles.utils.types import RolloutBatch


class FSDPTrainActor(TrainActor):
    """The policy, its optimizer and, for the KL term, its reference, each sharded over all processes."""

    world: FSDPWorld

    def _build(self) -> None:
        check_gradients_are_averaged(self.world)
        self.model = self._build_seeded_model()
        self.optimizer = build_optimizer(self.args, self.model)

    def _build_seeded_model(self) -> GPT:
        return shard_model(build_seeded_gpt(self.args, self.vocab_size, self.world.device), self.world)

    def _schedule_learning_rate(self) -> None:
        self.scheduler = build_lr_scheduler(self.args, self.optimizer, num_steps_done=self.num_steps_done)

    def _build_reference(self, folder: Path | None) -> None:
        self.reference = self._build_seeded_model().requires_grad_(False).eval()
        if folder is not None:
            checkpoint.load_model(folder, self.reference, flag="--ref-load")

    @torch.no_grad()
    def _compute_log_probs(
        self, iterators: list[DataIterator], num_microbatches: list[int], *, store_prefix: str
    ) -> dict[str, list[torch.Tensor]]:
        model = self.reference if store_prefix else self.model
        assert isinstance(model, FSDPModule)
        results, total = [], sum(num_microbatches)
        for index in range(total):
            self.report(f"{store_prefix}log-probs {index + 1}/{total}")
            batch = self._next_batch(iterators[0])
            results.append(self._score(compute_logits(model, batch), batch))
        # A backward pass would have done so; without one, whoever asks for weights next would meet whole ones.
        model.reshard()
        return aggregate_forward_results(results, iterators[0], self.args, store_prefix)

    def _compute_gradients(
        self, iterators: list[DataIterator], num_microbatches: int
    ) -> tuple[dict[str, float], float]:
        assert isinstance(self.model, FSDPModule)
        self.optimizer.zero_grad(set_to_none=True)
        log_dicts = []
        for index in range(num_microbatches):
            self.report(f"micro-batch {index + 1}/{num_microbatches}")
            # Gradients add up unsharded and cross the processes once a step: the same sum with fewer messages.
            self.model.set_requires_gradient_sync(index == num_microbatches - 1)
            batch = self._next_batch(iterators[0])
            loss, _, log_dict = loss_function(self.args, batch, num_microbatches, compute_logits(self.model, batch))
            loss.backward()
            log_dicts.append(log_dict)
        return aggregate_train_losses(log_dicts), self._clip_gradients()

    def _clip_gradients(self) -> float:
        """Scale the gradient to a norm of at most `clip_grad` (0: leave it) and return its norm before that."""
        limit = self.args.clip_grad or float("inf")
        return gather_whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)).item()

    def _step(self) -> float:
        learning_rate = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        return learning_rate

    def _gather_weights(self, replica: GPT) -> None:
        copy_full_weights(self.model, replica)

    def _write_state(self, folder: Path) -> None:
        checkpoint.write_state(folder, self.model, self.optimizer)

    def _read_state(self, folder: Path) -> None:
        checkpoint.load_model(folder, self.model, flag="--load")
        checkpoint.load_optimizer(folder, self.model, self.optimizer, flag="--load")


def compute_logits(model: GPT, batch: RolloutBatch) -> torch.Tensor:
    """Run the model on a packed micro-batch; `[1, T, V]`."""
    return model(batch["tokens"], batch["position_ids"], batch["cu_seqlens"], batch["max_seqlen"])
