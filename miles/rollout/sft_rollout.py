"""Rollouts without sampling: the label is the response, for `--loss-type sft_loss`."""

import torch
from torch import nn

from miles.rollout.data_source import DataSource
from miles.rollout.tokenizer import Tokenizer, encode_prompt
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import Sample


def generate_rollout(
    args: Options,
    rollout_id: int,
    data_source: DataSource,
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device,
) -> list[Sample]:
    """Return this rank's prompt groups with `label + end token` as the response and reward 0.

    Args:
        args: Reads max_position_embeddings.
        rollout_id: Which rollout.
        data_source: Gives the prompt groups; this rank takes every `world_size`-th, from the `rank`-th on.
        model: Not used.
        tokenizer: Encodes prompts and labels.
        rank: This rank's number among those that share the rollout.
        world_size: Their number.
        device: Not used.

    Raises:
        UserError: a sample has no label, or prompt and label together are longer than the model's positions.
    """
    groups = data_source.get_samples(rollout_id)[rank::world_size]
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        _teach(sample, tokenizer, args.max_position_embeddings)
    return samples


def _teach(sample: Sample, tokenizer: Tokenizer, max_length: int) -> None:
    if sample.label is None:
        raise UserError(f"sample {sample.index} has no label to learn from; name its key with --label-key")
    response = [*tokenizer.encode(sample.label), tokenizer.eos_id]
    sample.tokens = encode_prompt(tokenizer, sample) + response
    if len(sample.tokens) > max_length:
        raise UserError(
            f"sample {sample.index}: prompt, label and end token make {len(sample.tokens)} tokens, more than "
            f"max_position_embeddings={max_length}; shorten it or raise --max-position-embeddings"
        )
    sample.response = sample.label
    sample.response_length = len(response)
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
