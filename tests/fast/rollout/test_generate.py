"""The sampler against a row-by-row one that walks the CDF in plain Python, and its invariance to ranks."""

import math
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles.backends.experimental.fsdp_utils.models.gpt import GPT, GPTConfig
from miles.rollout import generate
from miles.rollout.data_source import DataSource, build_data_source
from miles.rollout.generate import draw_tokens, gather_rollouts, generate_rollout, sample_responses
from miles.rollout.tokenizer import CharTokenizer
from miles.utils.errors import UserError
from miles.utils.types import Sample
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks

TOKENIZER = CharTokenizer()
CPU = torch.device("cpu")


def make_args(**changes: Any) -> Namespace:
    defaults = {
        "rollout_seed": 3,
        "rollout_temperature": 0.7,
        "rollout_max_response_len": 5,
        "rollout_batch_size": 5,
        "n_samples_per_prompt": 2,
        "max_position_embeddings": 32,
        "prompt_data": None,
        "rm_type": None,
        "custom_rm_path": None,
    }
    return Namespace(**{**defaults, **changes})


def make_model() -> GPT:
    """A policy far enough from uniform that a wrong context shows, and that ends some rows early."""
    model = GPT(GPTConfig(TOKENIZER.vocab_size, 16, 1, 2, 32), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.16)
    return model


MODEL = make_model()


def source_of(args: Namespace) -> DataSource:
    return build_data_source(args, TOKENIZER)


def rollout(args: Namespace, rollout_id: int = 0, **ranks: int) -> list[Sample]:
    return generate_rollout(args, rollout_id, source_of(args), MODEL, TOKENIZER, device=CPU, **ranks)


def naive_response(args: Namespace, rollout_id: int, sample: Sample) -> tuple[list[int], list[float]]:
    """One row at a time; the cumulative probability is summed in a loop."""
    noise = np.random.default_rng([args.rollout_seed, rollout_id, sample.index]).random(args.rollout_max_response_len)
    tokens, response, log_probs = TOKENIZER.encode(sample.prompt), [], []
    for threshold in noise.tolist():
        ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
        with torch.no_grad():
            logits = MODEL(torch.tensor([tokens]), torch.arange(len(tokens))[None], ends, len(tokens))[0, -1]
        scaled = [value / args.rollout_temperature for value in logits.tolist()]
        log_total = math.log(sum(map(math.exp, scaled)))
        passed, token = 0.0, -1
        while passed <= threshold:
            token += 1
            passed += math.exp(scaled[token] - log_total)
        tokens.append(token)
        response.append(token)
        log_probs.append(scaled[token] - log_total)
        if token == TOKENIZER.eos_id:
            break
    return response, log_probs


def test_samples_equal_the_row_by_row_sampler() -> None:
    args = make_args(rollout_batch_size=10)
    samples = rollout(args, rollout_id=2)
    assert len(samples) == 20
    for sample in samples:
        response, log_probs = naive_response(args, 2, sample)
        assert sample.tokens == TOKENIZER.encode(sample.prompt) + response
        assert sample.response_length == len(response)
        assert sample.response == TOKENIZER.decode(response)
        # float32 log-softmax over 14 tokens against float64.
        assert sample.rollout_log_probs == pytest.approx(log_probs, abs=2e-5)
    lengths = {sample.response_length for sample in samples}
    assert len(lengths) > 2  # rows end at different times, so the batch shrank while it was sampled


def test_the_end_token_counts_and_decides_the_status() -> None:
    samples = rollout(make_args(rollout_batch_size=20))
    ended = [sample for sample in samples if sample.tokens[-1] == TOKENIZER.eos_id]
    cut = [sample for sample in samples if sample.tokens[-1] != TOKENIZER.eos_id]
    assert ended and cut
    assert {sample.status for sample in ended} == {Sample.Status.COMPLETED}
    assert {sample.status for sample in cut} == {Sample.Status.TRUNCATED}
    assert {sample.response_length for sample in cut} == {5}
    for sample in samples:
        assert len(sample.rollout_log_probs) == sample.response_length
        assert TOKENIZER.eos_id not in sample.tokens[:-1]
        assert 0 <= sample.reward <= 1


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_any_number_of_ranks_draws_the_same(world_size: int) -> None:
    args = make_args()
    whole = rollout(args)
    shares = [rollout(args, rank=rank, world_size=world_size) for rank in range(world_size)]
    # 5 groups over 7 ranks leave two ranks without any, over 3 ranks an uneven share.
    assert [len(share) for share in shares] == [2 * len(range(rank, 5, world_size)) for rank in range(world_size)]
    together = sorted((sample for share in shares for sample in share), key=lambda sample: sample.index)
    assert [sample.tokens for sample in together] == [sample.tokens for sample in whole]
    for got, expected in zip(together, whole, strict=True):
        assert got.rollout_log_probs == pytest.approx(expected.rollout_log_probs, abs=1e-5)
        assert got.reward == expected.reward


def test_a_repeated_rollout_is_equal_and_other_seeds_rollouts_and_samples_differ() -> None:
    args = make_args()
    first = rollout(args)
    assert rollout(args) == first
    assert [s.tokens for s in rollout(args, rollout_id=1)] != [s.tokens for s in first]
    fixed_prompt = source_of(args).get_samples(0)[0][0]
    noises = [
        generate.sampling_noise(make_args(rollout_seed=seed), rollout_id, [Sample(index=index)])
        for seed, rollout_id, index in [(3, 0, 0), (4, 0, 0), (3, 1, 0), (3, 0, 1)]
    ]
    assert fixed_prompt.index == 0
    assert len({tuple(noise.flatten().tolist()) for noise in noises}) == 4


def test_draw_tokens_takes_the_first_whose_cumulative_probability_exceeds_the_noise() -> None:
    # Probabilities 0, 1/2, 0, 1/4, 1/4: cumulative 0, 0.5, 0.5, 0.75, 1. No noise reaches a token without probability.
    logits = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25]).log().expand(6, 5)
    noise = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 1e-16], dtype=torch.float64)
    token, log_prob = draw_tokens(logits, noise)
    assert token.tolist() == [1, 1, 3, 3, 4, 4]
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]))


def test_frequencies_match_probabilities() -> None:
    logits = torch.tensor([1.0, -1.0, 0.5])
    noise = torch.from_numpy(np.random.default_rng(0).random(20_000))
    token, _ = draw_tokens(logits.expand(20_000, 3), noise)
    # Standard deviation of a frequency: at most sqrt(0.25 / 20000) = 0.0035.
    torch.testing.assert_close(torch.bincount(token) / 20_000, logits.softmax(0), rtol=0, atol=0.015)


class Recorder(nn.Module):
    """Gives one token all the weight, and notes how it was called."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, tokens: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        self.calls.append((self.training, torch.is_grad_enabled()))
        logits = torch.zeros(1, tokens.size(1), 4)
        logits[..., self.token] = 100.0
        return logits


@pytest.mark.parametrize(("token", "calls"), [(3, 1), (2, 6)], ids=["all end", "none ends"])
def test_sampling_is_without_gradient_in_eval_mode_and_stops_when_all_have_ended(token: int, calls: int) -> None:
    model = Recorder(token)
    responses = sample_responses(
        model, [[0], [1, 1]], torch.full((2, 6), 0.5, dtype=torch.float64), eos_id=3, temperature=1.0
    )
    assert model.calls == [(False, False)] * calls
    assert model.training
    assert [response.tokens for response in responses] == [[token] * calls] * 2


def test_gather_sorts_the_samples_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args()
    shares = [rollout(args, rank=rank, world_size=2) for rank in range(2)]
    monkeypatch.setattr(generate, "all_gather_objects", lambda value, group: shares)
    gathered = gather_rollouts(args, 0, source_of(args), MODEL, TOKENIZER, device=CPU)
    assert [sample.index for sample in gathered] == list(range(10))
    monkeypatch.setattr(generate, "all_gather_objects", lambda value, group: [shares[0], shares[0]])
    with pytest.raises(UserError, match="unique index each, over all ranks"):
        gather_rollouts(args, 0, source_of(args), MODEL, TOKENIZER, device=CPU)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "must return a list of Sample, got NoneType"),
        ([[Sample(index=0)]], "must return a list of Sample, got list"),
        ([Sample(index=0), Sample()], "unique index each"),
        ([Sample(index=0), Sample(index=0)], "unique index each"),
    ],
)
def test_what_a_custom_rollout_function_returns_is_checked(returned: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        gather_rollouts(
            make_args(), 0, None, MODEL, TOKENIZER, device=CPU, rollout_function=lambda *args, **ranks: returned
        )


def test_rollouts_of_several_rows_come_from_one_rank_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, 5), (1, 5), (2, None), (3, 8), (4, None), (5, 8)]
    samples = [Sample(index=index, rollout_id=rollout_id) for index, rollout_id in rows]

    def gather(*shares: list[Sample]) -> list[int]:
        monkeypatch.setattr(generate, "all_gather_objects", lambda value, group: list(shares))
        gathered = gather_rollouts(
            make_args(), 0, None, MODEL, TOKENIZER, device=CPU, rollout_function=lambda *args, **ranks: shares[0]
        )
        return [sample.index for sample in gathered]

    assert gather(samples[2:], samples[:2]) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"ranks 0 and 2 both have samples of rollout_id 8; .*over all ranks"):
        gather(samples[:4], [], samples[4:])
    # Ids of another kind are left to conversion, which says what is wrong with them.
    assert gather([Sample(index=0, rollout_id=[1])], [Sample(index=1, rollout_id=[1])]) == [0, 1]


def test_gather_in_one_process_is_the_rollout() -> None:
    args = make_args()
    assert gather_rollouts(args, 1, source_of(args), MODEL, TOKENIZER, device=CPU) == rollout(args, 1)


def test_two_processes_gather_the_rollout_of_one_and_stop_together() -> None:
    args = make_args()

    def failing_on_rank_1(*_: Any, rank: int, **__: Any) -> list[Sample]:
        if rank == 1:
            raise UserError("reward of sample 3")
        return []

    def gather() -> tuple[list[Sample], str]:
        dist.init_process_group("gloo")
        gathered = gather_rollouts(args, 0, source_of(args), MODEL, TOKENIZER, device=CPU)
        with pytest.raises(UserError) as error:
            gather_rollouts(args, 0, None, MODEL, TOKENIZER, device=CPU, rollout_function=failing_on_rank_1)
        dist.destroy_process_group()
        return gathered, str(error.value)

    (first, first_error), (second, second_error) = run_ranks(gather, 2)
    assert first == second
    assert [sample.tokens for sample in first] == [sample.tokens for sample in rollout(args)]
    assert first_error == second_error == "reward of sample 3"
