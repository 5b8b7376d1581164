"""What is checked: the rows of one optimizer step and its loss, and how a backend splits them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from miles.utils.options import Options

VOCAB_SIZE = 11
"""Odd and small: under tensor parallelism the vocabulary needs padding."""

PAD_TOKEN_ID = 0

SKIPPED_VALUE = 0.0
"""What stands for the value of a step that was skipped; it has no gradient."""


@dataclass(frozen=True)
class Scores:
    """What the float64 model says about one row's T response tokens.

    Attributes:
        log_probs: Log-probability of each token, nats, float64 `[T]`, with gradient.
        entropy: Entropy of the distribution that each token was drawn from, nats, float64 `[T]`.
        logits: Logits that predict each token, float64 `[T, V]`, before any temperature.
    """

    log_probs: Tensor
    entropy: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Row:
    """One training row: a prompt and T response tokens.

    Attributes:
        mask: T entries 0 and 1; an active token is 1.
        tokens: Prompt and response, ids from 0 to `VOCAB_SIZE - 1`; None: made up, with `prompt_length`.
        prompt_length: Prompt tokens where `tokens` are made up, at least 1.
        group: Prompt group that the row belongs to.
        rollout: Rollout that the row is a part of; None: it is a rollout of its own.
        advantage: A_i, and the row's reward in the rollout's log.
        loss_weights: T weights of the tokens' loss, at least 0; None: 1 each.
        log_probs: T log-probabilities of the old policy, nats; None (on every row alike): the backend computes them.
        rollout_log_probs: T of the engine that sampled; None: not there.
        ref_log_probs: T of the reference policy, for `--use-kl-loss`.
        values: T old predictions, for the value loss.
        returns: T targets, for the value loss.
    """

    mask: tuple[int, ...]
    tokens: tuple[int, ...] | None = None
    prompt_length: int = 2
    group: int = 0
    rollout: int | None = None
    advantage: float = 0.0
    loss_weights: tuple[float, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    rollout_log_probs: tuple[float, ...] | None = None
    ref_log_probs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    returns: tuple[float, ...] | None = None

    @property
    def response_length(self) -> int:
        """T."""
        return len(self.mask)

    @property
    def total_length(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_length + len(self.mask) if self.tokens is None else len(self.tokens)


Definition = Callable[[Scores, Row], "Tensor | Mapping[str, Tensor]"]


@dataclass(frozen=True)
class CustomLoss:
    """A loss function of `--custom-loss-function-path`, and what it has to come to.

    Attributes:
        path: `module.function`, importable here.
        definition: Returns one row's per-token loss, `[T]` float64 from the row's `Scores`; or a mapping of metric
            names to such values, "loss" among them. Plain formulas, no reduction.
    """

    path: str
    definition: Definition


CorrectionDefinition = Callable[[Options, Row, "Tensor | None"], "tuple[Tensor, Sequence[int], Mapping[str, Tensor]]"]


@dataclass(frozen=True)
class CustomCorrection:
    """A correction of `--custom-tis-function-path`, and what it does to one row.

    Attributes:
        path: `module.function`, importable here.
        definition: Called with the run's arguments, a row, and log pi_train - log pi_rollout at its T tokens, float64
            `[T]`, or None where the rollout has no log-probs. Returns what the row's policy loss is multiplied by,
            `[T]`; T entries 0 and 1, the tokens that it keeps; and metrics by name, `[T]` each.
    """

    path: str
    definition: CorrectionDefinition


ReducerDefinition = Callable[[Sequence[Row], Sequence[Sequence[int]], float], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class CustomReducer:
    """A reducer of `--custom-pg-loss-reducer-function-path`, and the weights of the unsplit step.

    Attributes:
        path: `module.function`, importable here.
        definition: Called with all rows of the step, their masks after any correction, and what the trainer divides
            by: the samples of the step or, under `token_mean`, the tokens that are counted. Returns for each row the T
            weights that its tokens have in the value of the step, that division included; those of tokens that are not
            kept are never looked at. Loss weights multiply them.
    """

    path: str
    definition: ReducerDefinition


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        rows: The rows of all ranks.
        mode: Value of `--loss-aggregation`.
        divisor: L of `constant`.
        loss: "policy", "sft", "value" (the head is the vocabulary's first entry), or a loss of one's own.
        correction: An off-policy correction of one's own, in place of the built-in ones; switch it on in `options`, by
            `--use-tis` or `--get-mismatch-metrics`.
        reducer: A reducer of one's own, in place of `mode`, which still chooses what the sum is divided by.
        options: More options of `train.py`, such as `("--eps-clip", "0.1")` or sizes of the model.
    """

    rows: Sequence[Row]
    mode: str = "sample_mean"
    divisor: float | None = None
    loss: str | CustomLoss = "policy"
    correction: CustomCorrection | None = None
    reducer: CustomReducer | None = None
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "options", tuple(self.options))
        if not self.rows:
            raise ValueError("a step needs at least one row")
        if isinstance(self.loss, str) and self.loss not in ("policy", "sft", "value"):
            raise ValueError(f"loss must be 'policy', 'sft', 'value' or a CustomLoss, got {self.loss!r}")
        if len({row.log_probs is None for row in self.rows}) > 1:
            raise ValueError("give log_probs on every row or on none")
        if self.correction is not None and not {"--use-tis", "--get-mismatch-metrics"}.intersection(self.options):
            raise ValueError("a correction needs --use-tis or --get-mismatch-metrics among the options")

    def __str__(self) -> str:
        loss = self.loss if isinstance(self.loss, str) else self.loss.path
        plug_ins = [plug_in.path for plug_in in (self.correction, self.reducer) if plug_in is not None]
        return " ".join([f"{loss} {self.mode}, {len(self.rows)} rows", *plug_ins, *self.options])


@dataclass(frozen=True)
class Split:
    """How a step is spread over ranks and micro-batches.

    Attributes:
        dp: Data-parallel ranks.
        cp: Context-parallel ranks.
        pp: Pipeline stages.
        tp: Tensor-parallel ranks.
        virtual_stages: Stages on each pipeline rank, None for one.
        micro_batch_size: Rows in a micro-batch; None, without `max_tokens`: all of the rank's.
        max_tokens: Token budget of a micro-batch and context-parallel rank, in place of `micro_batch_size`.
        rows: Positions of the rows on each data-parallel rank, which may be none; None: dealt in turn.
    """

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1
    virtual_stages: int | None = None
    micro_batch_size: int | None = None
    max_tokens: int | None = None
    rows: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.max_tokens is not None:
            raise ValueError("micro_batch_size and max_tokens exclude each other; give one of them")
        if self.rows is not None and len(self.rows) != self.dp:
            raise ValueError(f"rows must name those of each of {self.dp} data-parallel ranks, got {len(self.rows)}")

    @property
    def num_ranks(self) -> int:
        """Processes that the split needs."""
        return self.dp * self.cp * self.pp * self.tp

    @property
    def topology(self) -> tuple[int | None, ...]:
        """What splits have in common that one group of processes can run."""
        return self.dp, self.cp, self.pp, self.tp, self.virtual_stages

    def rows_by_rank(self, num_rows: int) -> list[list[int]]:
        """Return the positions of the rows on each data-parallel rank.

        Raises:
            ValueError: `rows` does not hold each row once.
        """
        if self.rows is None:
            return [list(range(rank, num_rows, self.dp)) for rank in range(self.dp)]
        if sorted(row for held in self.rows for row in held) != list(range(num_rows)):
            raise ValueError(f"rows must hold each of the positions 0 to {num_rows - 1} once, got {self.rows}")
        return [list(held) for held in self.rows]

    def size(self, step: Step) -> tuple[int, int, int]:
        """Return (ranks, micro-batches of the busiest rank or a lower bound of them, rows): what "smallest" means."""
        held = self.rows_by_rank(len(step.rows))
        if self.max_tokens is not None:
            tokens = max(sum(step.rows[row].total_length for row in rows) for rows in held)
            num_microbatches = math.ceil(tokens / (self.max_tokens * self.cp))
        else:
            num_microbatches = math.ceil(max(map(len, held)) / self.micro_batch_size) if self.micro_batch_size else 1
        return self.num_ranks, num_microbatches, len(step.rows)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("dp", "cp", "pp", "tp")}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one process"]
        if self.virtual_stages:
            parts.append(f"{self.virtual_stages} virtual stages")
        for name in ("micro_batch_size", "max_tokens", "rows"):
            if getattr(self, name) is not None:
                parts.append(f"{name} {getattr(self, name)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """What a step comes to.

    Attributes:
        value: The loss, `SKIPPED_VALUE` where the step was skipped.
        gradient: d value / d parameter by name, in the shapes of the package's `GPT`, float64; empty where skipped.
        metrics: Every logged number by name: those of the step, "grad_norm", and the rollout's as "rollout/..."; of a
            skipped step "skipped_steps", what is said of its data, and the rollout's.
    """

    value: float
    gradient: Mapping[str, Tensor] = field(repr=False)
    metrics: Mapping[str, float]
