"""The Megatron-Core training actor: its schedules run the micro-batches, its optimizer makes the steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from miles.backends.experimental.fsdp_utils.models.gpt import GPT
from miles.backends.experimental.fsdp_utils.optimizer import scheduled_factor
from miles.backends.megatron_utils import checkpoint
from miles.backends.megatron_utils.model import build_chunks, build_config, build_optimizer, forward_chunk, wrap_ddp
from miles.backends.megatron_utils.weights import gather_gpt_weights, load_gpt_weights
from miles.backends.training_utils.data import DataIterator
from miles.backends.training_utils.log_utils import aggregate_forward_results, aggregate_train_losses
from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.backends.training_utils.parallel import get_parallel_state
from miles.backends.training_utils.train_actor import TrainActor, build_seeded_gpt
from miles.utils.types import RolloutBatch

LAYOUT_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "use_distributed_optimizer",
)


class MegatronTrainActor(TrainActor):
    """The policy as this rank's chunks of a Megatron-Core GPT, wrapped in Megatron's data parallelism."""

    def _build(self) -> None:
        per_token = LossAggregation.of(self.args).counts_tokens
        self.config = build_config(self.args, per_token=per_token)
        self.chunks = self._build_seeded_chunks()
        self.model = wrap_ddp(self.args, self.config, self.chunks)
        if self.args.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.optimizer = build_optimizer(self.args, self.model)
        self.reference: list[GPTModel] = []

    def _build_seeded_chunks(self) -> list[GPTModel]:
        chunks = build_chunks(self.args, self.config, vocab_size=self.vocab_size, device=self.world.device)
        seeded = build_seeded_gpt(self.args, self.vocab_size, self.world.device)
        load_gpt_weights(seeded, chunks, tp=get_parallel_state().tp)
        return chunks

    def _build_reference(self, folder: Path | None) -> None:
        self.reference = self._build_seeded_chunks()
        if folder is not None:
            checkpoint.read_model(folder, self.reference, flag="--ref-load")
        for chunk in self.reference:
            chunk.requires_grad_(False).eval()

    def _compute_log_probs(
        self, iterators: list[DataIterator], num_microbatches: list[int], *, store_prefix: str
    ) -> dict[str, list[torch.Tensor]]:
        model = self.reference if store_prefix else self.model

        def score(batch: RolloutBatch, logits: torch.Tensor, non_loss_data: bool = True) -> dict[str, Any]:
            return self._score(logits, batch)

        results = []
        for total in num_microbatches:
            self.report(f"{store_prefix}log-probs, {total} micro-batches")
            results += self._run(model, iterators, total, score, forward_only=True)
        if not get_parallel_state().is_pp_last_stage:
            return {}
        return aggregate_forward_results(results, iterators[0], self.args, store_prefix)

    def _compute_gradients(
        self, iterators: list[DataIterator], num_microbatches: int
    ) -> tuple[dict[str, float], float]:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(batch: RolloutBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            return loss_function(self.args, batch, num_microbatches, logits, apply_megatron_loss_scaling=True)

        self.report(f"{num_microbatches} micro-batches")
        log_dicts = self._run(self.model, iterators, num_microbatches, loss, forward_only=False)
        metrics = aggregate_train_losses(log_dicts) if get_parallel_state().is_pp_last_stage else {}
        self.optimizer.prepare_grads()
        return self._sync_metrics(metrics), float(self.optimizer.get_grad_norm())

    def _run(
        self, model: list[Any], iterators: list[DataIterator], total: int, finish: Any, *, forward_only: bool
    ) -> list[Any]:
        """Run Megatron's schedule over `total` micro-batches; return what `finish(batch, logits)` logs on each."""

        def forward_step(iterator: DataIterator, chunk: Any) -> tuple[torch.Tensor, Any]:
            batch = self._next_batch(iterator)
            return forward_chunk(chunk, batch, vocab_size=self.vocab_size), partial(finish, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=total,
            seq_length=1,  # not read: stages exchange the shapes of what they send
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _step(self) -> float:
        learning_rate = self.args.lr * scheduled_factor(self.args, self.num_steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return learning_rate

    def _schedule_learning_rate(self) -> None:
        """Nothing to position: the rate is a function of the number of steps done."""

    def _sync_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Broadcast the last pipeline stage's metrics; only that stage has seen logits."""
        pp = get_parallel_state().pp
        if pp.size == 1:
            return metrics
        carrier = [metrics]
        dist.broadcast_object_list(carrier, src=dist.get_process_group_ranks(pp.group)[-1], group=pp.group)
        return carrier[0]

    def _gather_weights(self, replica: GPT) -> None:
        state = get_parallel_state()
        gather_gpt_weights(self.chunks, replica, tp=state.tp, pp=state.pp)

    def _write_state(self, folder: Path) -> None:
        checkpoint.write_state(folder, self.chunks, self.optimizer)

    def _read_state(self, folder: Path) -> None:
        checkpoint.read_model(folder, self.chunks, flag="--load")
        checkpoint.read_optimizer(folder, self.optimizer, flag="--load")

    def describe_architecture(self) -> dict[str, int | str]:
        """Return the model's sizes and the parallel layout, which a checkpoint's files follow."""
        layout = {name: getattr(self.args, name) for name in LAYOUT_ARGUMENTS}
        return {
            **super().describe_architecture(),
            **layout,
            "world_size": self.world.size,
        }
