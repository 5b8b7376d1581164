"""Rollouts sampled from the policy itself, with the log-probability of every sampled token.

Shapes: B rows (samples), S longest row so far, R longest response, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles.ray.rollout.row_groups import first_conflict
from miles.rollout.data_source import DataSource
from miles.rollout.rm_hub import set_rewards
from miles.rollout.tokenizer import Tokenizer, encode_prompt
from miles.utils.distributed_utils import all_gather_objects, on_every_rank
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import Sample

RolloutFunction = Callable[..., list[Sample]]


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
    """Sample answers to this rank's prompt groups and reward them.

    The noise of a token depends on `(rollout_seed, rollout_id, sample index, position)` alone, so neither the number
    of ranks nor a resumed run changes what is drawn (but for rounding in the logits).

    Args:
        args: Reads rollout_seed, rollout_temperature, rollout_max_response_len, and what rewards read.
        rollout_id: Which rollout.
        data_source: Gives the prompt groups; this rank answers every `world_size`-th, from the `rank`-th on.
        model: The whole policy, called as `GPT.forward`.
        tokenizer: Its tokenizer.
        rank: This rank's number among those that share the rollout.
        world_size: Their number.
        device: Where `model` lives.

    Returns:
        This rank's samples, with tokens (the end token included), response, `rollout_log_probs` at the rollout
        temperature, status and reward.

    Raises:
        UserError: a reward function is missing or returns no finite number.
    """
    groups = data_source.get_samples(rollout_id)[rank::world_size]
    samples = [sample for group in groups for sample in group]
    if not samples:
        return []
    responses = sample_responses(
        model,
        [encode_prompt(tokenizer, sample) for sample in samples],
        sampling_noise(args, rollout_id, samples).to(device),
        eos_id=tokenizer.eos_id,
        temperature=args.rollout_temperature,
    )
    for sample, response in zip(samples, responses, strict=True):
        _record(sample, response, tokenizer)
    set_rewards(args, samples)
    return samples


def gather_rollouts(
    args: Options,
    rollout_id: int,
    data_source: DataSource | None,
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    device: torch.device,
    rollout_function: RolloutFunction = generate_rollout,
    group: dist.ProcessGroup | None = None,
) -> list[Sample]:
    """Run `rollout_function` on every rank and return the samples of all ranks, on each of them.

    Args:
        args: Handed on.
        rollout_id: Which rollout.
        data_source: Handed on.
        model: Handed on; must be whole on each rank, since the ranks do not stay in step.
        tokenizer: Handed on.
        device: Handed on.
        rollout_function: Has `generate_rollout`'s signature; must run no collectives. A rollout that it stores as
            several rows has one `rollout_id` and comes from one rank; each row has an `index` of its own.
        group: Ranks that share the rollout; None is the world, or this process alone without one.

    Returns:
        Samples by rising `index`.

    Raises:
        UserError: as `rollout_function`; it returns no list of samples; indices are missing or not unique; or two
            ranks use one `rollout_id`.
    """
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)

    def run() -> list[Sample]:
        samples = rollout_function(
            args, rollout_id, data_source, model, tokenizer, rank=rank, world_size=world_size, device=device
        )
        if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
            raise UserError(f"a rollout function must return a list of Sample, got {type(samples).__name__}")
        return samples

    shares = all_gather_objects(on_every_rank(run, group), group)
    samples = [sample for share in shares for sample in share]
    indices = [sample.index for sample in samples]
    if None in indices or len(set(indices)) < len(indices):
        raise UserError(
            "the samples of a rollout function need a unique index each, over all ranks, also the rows of one rollout"
        )
    _check_rollouts_of_one_rank(shares)
    return sorted(samples, key=lambda sample: sample.index)


def _check_rollouts_of_one_rank(shares: list[list[Sample]]) -> None:
    """Check that no two ranks gave different rollouts one id, which would merge them."""
    owned = ((sample.rollout_id, rank) for rank, share in enumerate(shares) for sample in share)
    # Conversion refuses ids of other kinds, and says so.
    conflict = first_conflict(pair for pair in owned if isinstance(pair[0], Integral))
    if conflict is not None:
        rollout, first, second = conflict
        raise UserError(
            f"ranks {first} and {second} both have samples of rollout_id {rollout}; a rollout function must give each "
            "rollout an id of its own over all ranks, such as the index of its first sample"
        )


@dataclass(frozen=True)
class Response:
    """What was sampled after one prompt.

    Attributes:
        prompt: Prompt tokens.
        tokens: Response tokens, the end token included.
        log_probs: Their log-probabilities in nats.
    """

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]


def sampling_noise(args: Options, rollout_id: int, samples: list[Sample]) -> Tensor:
    """Return uniform noise in [0, 1), float64 [B, R], one independent stream per sample."""
    length = args.rollout_max_response_len
    seeds: list[Any] = [[args.rollout_seed, rollout_id, sample.index] for sample in samples]
    return torch.from_numpy(np.stack([np.random.default_rng(seed).random(length) for seed in seeds]))


def sample_responses(
    model: nn.Module, prompts: list[list[int]], noise: Tensor, *, eos_id: int, temperature: float
) -> list[Response]:
    """Continue each prompt until the end token or R tokens.

    Args:
        model: The policy; called on the packed rows that have not ended.
        prompts: B prompts of at least one token.
        noise: Uniform in [0, 1), float64 [B, R]; on the model's device.
        eos_id: The end token.
        temperature: Divides the logits; above 0.
    """
    num_rows, max_new = noise.shape
    start = torch.tensor([len(prompt) for prompt in prompts], device=noise.device)
    width = int(start.max())
    grid = torch.tensor(
        [prompt + [eos_id] * (width - len(prompt) + max_new) for prompt in prompts], device=noise.device
    )
    log_probs = noise.new_zeros(num_rows, max_new, dtype=torch.float32)
    new = torch.zeros_like(start)
    active = torch.arange(num_rows, device=noise.device)
    was_training = model.training
    model.eval()
    for step in range(max_new):
        logits = _next_token_logits(model, grid[active, : width + step], start[active] + step)
        token, log_prob = draw_tokens(logits / temperature, noise[active, step])
        grid[active, start[active] + step] = token
        log_probs[active, step] = log_prob
        new[active] += 1
        active = active[token != eos_id]
        if not len(active):
            break
    model.train(was_training)
    rows = zip(prompts, grid.tolist(), log_probs.tolist(), new.tolist(), strict=True)
    return [
        Response(prompt, row[len(prompt) : len(prompt) + count], row_log_probs[:count])
        for prompt, row, row_log_probs, count in rows
    ]


def draw_tokens(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by inverse CDF: the first token whose cumulative probability exceeds the noise.

    Args:
        logits: Float [B, V], the temperature divided out.
        noise: Uniform in [0, 1), float64 [B].

    Returns:
        Tokens, int64 [B], and their log-probabilities, float32 [B].
    """
    log_probs = logits.float().log_softmax(dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # The sum is 1 up to rounding only; scaling the noise by it keeps the last token's share right.
    threshold = noise[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.size(-1) - 1)
    return token[:, 0], log_probs.gather(-1, token)[:, 0]


@torch.no_grad()
def _next_token_logits(model: nn.Module, grid: Tensor, lengths: Tensor) -> Tensor:
    """Return the logits after the first `lengths` tokens of each row of `grid` [B, S], float32 [B, V]."""
    position = torch.arange(grid.size(1), device=grid.device).expand_as(grid)
    is_token = position < lengths[:, None]
    ends = lengths.cumsum(0)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int()
    logits = model(grid[is_token][None], position[is_token][None], cu_seqlens, int(lengths.max()))
    return logits[0, ends - 1]


def _record(sample: Sample, response: Response, tokenizer: Tokenizer) -> None:
    sample.tokens = response.prompt + response.tokens
    sample.response = tokenizer.decode(response.tokens)
    sample.response_length = len(response.tokens)
    sample.rollout_log_probs = response.log_probs
    has_ended = response.tokens[-1] == tokenizer.eos_id
    sample.status = Sample.Status.COMPLETED if has_ended else Sample.Status.TRUNCATED
