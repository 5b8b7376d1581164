"""TRL's GRPOTrainer with an exact loss aggregation: no line of TRL is patched, and TRL's configuration takes the mode.

    from miles.integrations.trl import GRPOConfig, GRPOTrainer

TRL computes each token's loss x_it, clipped and corrected as it is configured. What it would divide by is replaced:
every optimizer step's loss, and what is logged of it, is

    value = (1 / Z) * sum_i (1 / d_i) * sum_t m_it * x_it + beta * (the mean of the KL estimates)

over all completions i of the step, on all ranks and in all micro-batches. TRL takes advantages of any scale for each
completion, so the weights ride on them; its `dapo` loss adds products up and divides by one number, which is set to 1.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from miles.backends.training_utils.loss_aggregation import MODES
from miles.backends.training_utils.loss_hub.math_utils import compute_approx_kl
from miles.integrations.step_aggregation import StepAggregation
from miles.utils.errors import UserError
from miles.utils.loss_aggregation_args import CHOICES, check_choice, check_divisor, check_loss_aggregation_mode

try:
    import trl
except ImportError as error:
    raise ImportError(f'TRL cannot be imported ({error}); install it with: pip install "miles[trl]"') from error

VERSIONS = "trl>=1.16,<2"
"""What the tests have run with begins here. `check_seams` and the check at construction decide, not the number."""

SEAMS = {
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "_generate_and_score_completions": ("inputs",),
    "_prepare_inputs": ("generation_batch",),
    "_get_per_token_logps_and_entropies": (),
    "compute_loss": ("model", "inputs"),
    "_compute_loss": ("model", "inputs"),
}
"""The methods of TRL's trainer that are extended or called, with the arguments that are counted on."""

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""`loss_type`s with one clipped loss for each token, which TRL only averages differently."""

OTHER_LOSSES = ("cispo", "vespo")
"""`loss_type`s with a loss of their own for each token, that TRL divides as it does `dapo`."""


def check_seams(trainer: type) -> None:
    """Check that a trainer class has the methods that this module builds on.

    Raises:
        ImportError: naming each method that is gone, or that takes other arguments.
    """
    changed = []
    for name, arguments in SEAMS.items():
        method = getattr(trainer, name, None)
        known = () if method is None else inspect.signature(method).parameters
        missing = [argument for argument in arguments if argument not in known]
        if method is None or missing:
            changed.append(f"{name} is gone" if method is None else f"{name} has no argument {', '.join(missing)}")
    if changed:
        raise ImportError(
            f"trl {version('trl')} is not one that miles.integrations.trl fits: {'; '.join(changed)} in "
            f"{trainer.__name__}; install {VERSIONS}"
        )


check_seams(trl.GRPOTrainer)


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's configuration with the aggregation of this package; `TrlParser` and its YAML files take the new fields."""

    loss_aggregation: str = field(
        default="sample_mean",
        metadata={"help": f"What the loss of a step is a mean over: {', '.join(MODES)}.", "choices": list(MODES)},
    )
    loss_aggregation_divisor: float | None = field(
        default=None, metadata={"help": "The fixed number of tokens L that constant divides by; for constant alone."}
    )
    prompt_groups: str = field(
        default=CHOICES["prompt_groups"][0],
        metadata={
            "help": "complete: every optimizer step must hold whole groups of num_generations completions, else "
            "training is refused. ragged: prompt_mean takes the completions of a prompt that are in the step.",
            "choices": list(CHOICES["prompt_groups"]),
        },
    )
    aux_loss_aggregation: str = field(
        default=CHOICES["aux_loss_aggregation"][0],
        metadata={
            "help": "How the KL term (beta) is averaged: over completions, or as the policy loss is (match).",
            "choices": list(CHOICES["aux_loss_aggregation"]),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss_aggregation_mode(self.loss_aggregation)
        check_divisor(MODES[self.loss_aggregation], self.loss_aggregation_divisor)
        for name in ("prompt_groups", "aux_loss_aggregation"):
            check_choice(name, getattr(self, name), CHOICES[name])


_Trainer: Any = trl.GRPOTrainer if TYPE_CHECKING else object


class ExactAggregationMixin(_Trainer):
    """The aggregation, in front of a class that behaves as TRL's `GRPOTrainer` does."""

    loss_type: str
    _step: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("args") or next((value for value in args if isinstance(value, GRPOConfig)), None)
        _check_config(config)
        super().__init__(*args, **kwargs)
        if self.loss_type in CLIPPED_LOSSES:
            self.loss_type = "dapo"
        self._step_batches: list[Any] = []
        self._step_inputs: list[dict[str, Any]] = []
        _check_normalization(self)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """Remember the batches of the optimizer step that begins, which all have to be known before its first loss."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_batches, self._step_inputs = list(batches), []
        return batches, num_items

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Number the prompt groups, on each completion; the column goes through TRL's shuffling and splitting."""
        outputs = super()._generate_and_score_completions(inputs)
        size = self.num_generations if self.model.training else self.num_generations_eval
        rows = torch.arange(len(inputs), device=self.accelerator.device)
        outputs["prompt_groups"] = (self.accelerator.process_index * len(inputs) + rows) // size
        return outputs

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not self.model.training:
            return self._weighed([super()._prepare_inputs(generation_batch)], [0], samples_per_prompt=None)[0]
        if not self._step_inputs:
            self._step_inputs = self._prepared_step()
        return self._step_inputs.pop(0)

    def _prepared_step(self) -> list[dict[str, Any]]:
        """Generate what the optimizer step needs, and return the inputs of its micro-batches."""
        if not self._step_batches:
            raise RuntimeError("a batch came that get_batch_samples has not given out; train with trainer.train()")
        first, inputs = self._step, []
        try:
            for place, batch in enumerate(self._step_batches):
                self._step = first + place
                inputs.append(super()._prepare_inputs(batch))
        finally:
            self._step = first
        # A completion that comes twice in a step, under num_iterations > 1, answers its prompt in two groups.
        passes = [(first + place) // self.args.steps_per_generation for place in range(len(inputs))]
        complete = self.num_generations if self.args.prompt_groups == "complete" else None
        self._step_batches = []
        return self._weighed(inputs, passes, samples_per_prompt=complete)

    def _weighed(
        self, inputs: Sequence[dict[str, Any]], passes: Sequence[int], *, samples_per_prompt: int | None
    ) -> list[dict[str, Any]]:
        """Return the inputs with weights; every rank calls this.

        Args:
            inputs: This rank's micro-batches of a step.
            passes: Which pass over which generated batch each of them belongs to.
            samples_per_prompt: Size of complete groups, None for any.
        """
        counts = torch.cat([_loss_mask(batch).sum(1) for batch in inputs])
        groups = [
            (number, group)
            for number, batch in zip(passes, inputs, strict=True)
            for group in batch["prompt_groups"].tolist()
        ]
        config = self.args

        def weights_of(mode: str, divisor: float | None = None) -> Sequence[Tensor]:
            step = StepAggregation.of(
                mode, counts, prompt_ids=groups, divisor=divisor, samples_per_prompt=samples_per_prompt
            )
            sizes = [len(batch["prompt_groups"]) for batch in inputs]
            return step.row_weights.to(self.accelerator.device, torch.float32).unsqueeze(1).split(sizes)

        weights = weights_of(config.loss_aggregation, config.loss_aggregation_divisor)
        is_apart = self.beta != 0.0 and config.aux_loss_aggregation != "match"
        kl_weights = weights_of("sample_mean") if is_apart else weights
        # In training TRL takes num_items_in_batch for the tokens of steps_per_generation micro-batches.
        share = len(inputs) / config.steps_per_generation if self.model.training else 1.0
        unit = share / self.accelerator.num_processes
        return [
            {
                **batch,
                "advantages": _as_column(batch["advantages"]) * (weight * unit),
                "num_items_in_batch": torch.ones((), device=self.accelerator.device),
                "kl_weights": kl_weight,
            }
            for batch, weight, kl_weight in zip(inputs, weights, kl_weights, strict=True)
        ]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._last_log_probs = outputs[0]
        return outputs

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the micro-batch's share of the step's value, times the number of ranks, which average gradients."""
        with _without_kl(self):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if self.beta == 0.0 else loss + self.beta * self._kl_share(inputs)

    def _kl_share(self, inputs: dict[str, Any]) -> Tensor:
        """Return the micro-batch's share of the mean KL estimate (k3), and log the mean over its tokens."""
        mask = _loss_mask(inputs)
        log_probs = self._last_log_probs
        ratio = self._importance_ratio(log_probs, inputs, mask) if self.args.use_bias_correction_kl else None
        kl = compute_approx_kl(log_probs, inputs["ref_per_token_logps"], "k3", ratio)
        kl = torch.where(mask != 0, kl, 0)
        sums = self.accelerator.reduce(torch.stack([kl.detach().sum(), mask.sum()]), reduction="sum")
        self._metrics["train" if self.model.training else "eval"]["kl"].append((sums[0] / sums[1].clamp(min=1)).item())
        return (kl * inputs["kl_weights"]).sum()

    def _importance_ratio(self, log_probs: Tensor, inputs: dict[str, Any], mask: Tensor) -> Tensor:
        """Return pi / pi_old of each token, or of each completion, `[B, 1]`, where the importance is a sequence's."""
        log_ratio = log_probs - inputs.get("old_per_token_logps", log_probs.detach())
        if self.importance_sampling_level == "sequence":
            log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        return log_ratio.exp()


class GRPOTrainer(ExactAggregationMixin, trl.GRPOTrainer):
    """TRL's `GRPOTrainer` whose loss is the step's, as `GRPOConfig.loss_aggregation` says.

    Works with accumulation, several ranks, `num_iterations` > 1, any `steps_per_generation`, evaluation, resuming,
    tool masks, `mask_truncated_completions`, entropy masks (`top_entropy_quantile`), off-policy sequence masks and
    vLLM's importance correction. What masks, clips and corrections leave out of the sum stays in the divisors, as in
    TRL; a masked token is in neither. An expert router's load-balancing loss stays TRL's.

    Raises:
        UserError: at construction, where the configuration cannot be exact; the message has the reason. And before a
            step's first loss on every rank, where groups are not complete and `prompt_groups` demands it.
    """


def _check_config(config: Any) -> None:
    if not isinstance(config, GRPOConfig):
        raise UserError(
            "the trainer needs args=miles.integrations.trl.GRPOConfig(...), which is TRL's GRPOConfig with "
            f"loss_aggregation; got {type(config).__name__}"
        )
    losses = (*CLIPPED_LOSSES, *OTHER_LOSSES)
    reasons = {
        f"loss_type={config.loss_type!r} is divided by lengths inside TRL; choose {', '.join(losses)}": (
            config.loss_type not in losses
        ),
        "the entropy bonus (entropy_coef, use_adaptive_entropy) is a mean over each micro-batch in TRL; set it to 0": (
            config.entropy_coef != 0.0 or config.use_adaptive_entropy
        ),
        "several GPUs in one process (torch.nn.DataParallel) average losses; start one process for each GPU": (
            config.n_gpu > 1
        ),
        "context and sequence parallelism split completions, which the weights here do not follow": (
            _size(config, "cp_size") > 1 or _size(config, "sp_size") > 1
        ),
        f"gradient_accumulation_steps={config.gradient_accumulation_steps} is no multiple of steps_per_generation="
        f"{config.steps_per_generation}, so groups may be split over optimizer steps; make it one, or set "
        "prompt_groups='ragged'": (
            MODES[config.loss_aggregation].needs_prompt_groups
            and config.prompt_groups == "complete"
            and config.gradient_accumulation_steps % config.steps_per_generation != 0
        ),
    }
    wrong = [reason for reason, is_so in reasons.items() if is_so]
    if wrong:
        raise UserError(f"loss_aggregation={config.loss_aggregation!r} would not be exact: {'; '.join(wrong)}")


def _size(config: Any, name: str) -> int:
    return getattr(getattr(config, "parallelism_config", None), name, 1) or 1


def _check_normalization(trainer: Any) -> None:
    """Check on three tokens that TRL's loss is what the weights count on: sum_t m_t * loss_t over one number.

    Raises:
        UserError: it is another one, so this TRL averages otherwise than those that are known.
    """
    device = trainer.accelerator.device
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.25, -4.0]], device=device, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device=device)
    advantages = torch.tensor([[0.25], [-3.0]], device=device)
    probe = copy.copy(trainer)
    probe.__dict__ |= {
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (log_probs, torch.ones_like(log_probs), None),
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
    }
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages * (1 / (trainer.args.steps_per_generation * trainer.accelerator.num_processes)),
        "num_items_in_batch": torch.ones((), device=device),
    }
    is_training = trainer.model.training
    trainer.model.train()
    try:
        (found,) = torch.autograd.grad(trl.GRPOTrainer._compute_loss(probe, trainer.model, inputs), log_probs)
    finally:
        trainer.model.train(is_training)
    # The ratio to the old policy is 1, so that the gradient of a token's loss is its negated advantage.
    expected = -advantages * mask
    if not torch.allclose(found, expected, rtol=1e-5):
        raise UserError(
            f"trl {version('trl')} divides the loss {trainer.loss_type!r} otherwise than {VERSIONS}: gradient "
            f"{found.tolist()} of three tokens, expected {expected.tolist()}; install {VERSIONS}"
        )


@contextlib.contextmanager
def _without_kl(trainer: Any) -> Iterator[None]:
    """Let TRL's loss leave the KL term out."""
    beta, trainer.beta = trainer.beta, 0.0
    try:
        yield
    finally:
        trainer.beta = beta


def _loss_mask(inputs: dict[str, Any]) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _as_column(advantages: Tensor) -> Tensor:
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
