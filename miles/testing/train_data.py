"""A step as the package takes it: the arguments of a run, and the shard of each data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from miles.backends.training_utils.loss_aggregation import MODES
from miles.ray.rollout.row_groups import add_indices
from miles.ray.rollout.steps import add_step_columns
from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
from miles.testing.averages import rollout_keys
from miles.testing.step import VOCAB_SIZE, CustomLoss, Split, Step
from miles.utils.arguments import parse_args
from miles.utils.options import Options
from miles.utils.types import Sample

VALUE_LOSS_PATH = "miles.testing.value_head.first_logit_value_loss"

TOKEN_COLUMNS = ("log_probs", "ref_log_probs", "values", "returns")
"""Per-token columns of a row that training would have computed itself."""


def make_args(step: Step, split: Split, *, backend_options: Sequence[str] = ()) -> Options:
    """Return the resolved arguments of a run that trains on the step alone.

    Raises:
        UserError: the step or the split is one that a run refuses.
    """
    longest = max(row.total_length for row in step.rows)
    num_rollouts = len(set(rollout_keys(step.rows)))
    return parse_args(
        [
            *("--hidden-size", "8", "--num-layers", "2", "--num-attention-heads", "2", "--seed", "3"),
            *("--max-position-embeddings", str(max(24, longest)), "--clip-grad", "0", "--num-rollout", "1"),
            *("--rollout-batch-size", str(num_rollouts), "--n-samples-per-prompt", "1"),
            "--disable-rewards-normalization",
            *_loss_options(step),
            *_split_options(step, split),
            *backend_options,
            *step.options,
        ]
    )


def _loss_options(step: Step) -> Iterator[str]:
    yield from ("--loss-aggregation", step.mode)
    if step.divisor is not None:
        yield from ("--loss-aggregation-divisor", str(step.divisor))
    if MODES[step.mode].needs_prompt_groups:
        yield from ("--prompt-groups", "ragged")
    if step.loss == "sft":
        yield from ("--loss-type", "sft_loss")
    elif step.loss != "policy":
        path = step.loss.path if isinstance(step.loss, CustomLoss) else VALUE_LOSS_PATH
        yield from ("--loss-type", "custom_loss", "--custom-loss-function-path", path)
    if step.correction is not None:
        yield from ("--custom-tis-function-path", step.correction.path)
    if step.reducer is not None:
        yield from ("--custom-pg-loss-reducer-function-path", step.reducer.path)


def _split_options(step: Step, split: Split) -> Iterator[str]:
    if split.max_tokens is not None:
        yield from ("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(split.max_tokens))
    else:
        yield from ("--micro-batch-size", str(split.micro_batch_size or len(step.rows)))
    for option, size in (("context", split.cp), ("pipeline-model", split.pp), ("tensor-model", split.tp)):
        if size > 1:
            yield from (f"--{option}-parallel-size", str(size))
    if split.virtual_stages is not None:
        yield from ("--virtual-pipeline-model-parallel-size", str(split.virtual_stages))


def make_shards(args: Options, step: Step, split: Split) -> list[dict[str, Any]]:
    """Return each data-parallel rank's rows, as the package's conversion makes them and the split deals them out."""
    samples = [_sample(step, index) for index in range(len(step.rows))]
    data = convert_samples_to_train_data(args, samples, {}, None, None)
    data["total_lengths"] = [row.total_length for row in step.rows]
    for name in TOKEN_COLUMNS:
        column = [getattr(row, name) for row in step.rows]
        if None not in column:
            data[name] = column
    add_indices(data)
    add_step_columns(data, [range(len(step.rows))])
    return [
        {**{key: [column[row] for row in rows] for key, column in data.items()}, "step_row_counts": [len(rows)]}
        for rows in split.rows_by_rank(len(step.rows))
    ]


def row_tokens(step: Step, index: int) -> list[int]:
    """Return a row's tokens, prompt first; made up where the row has none, the same in every split."""
    row = step.rows[index]
    if row.tokens is not None:
        return list(row.tokens)
    length, spread = row.total_length, 3 * row.group + len(row.mask)
    return [1 + (spread * spread + 7 * place + 5 * place * spread) % (VOCAB_SIZE - 1) for place in range(length)]


def _sample(step: Step, index: int) -> Sample:
    row = step.rows[index]
    return Sample(
        group_index=row.group,
        index=index,
        rollout_id=row.rollout,
        tokens=row_tokens(step, index),
        response_length=row.response_length,
        reward=row.advantage,
        loss_mask=list(row.mask),
        loss_weights=None if row.loss_weights is None else list(row.loss_weights),
        rollout_log_probs=None if row.rollout_log_probs is None else list(row.rollout_log_probs),
        status=Sample.Status.COMPLETED,
    )
