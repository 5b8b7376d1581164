"""Log-probs and entropies against float64 log_softmax, by value and gradient, whole and split over the vocabulary."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles.backends.training_utils.loss_hub.token_scores import score_tokens
from miles.backends.training_utils.parallel import SINGLE, GroupInfo

NUM_POSITIONS, NUM_TOKENS, VOCAB, TEMPERATURE = 30, 20, 18, 0.7


def inputs():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(NUM_POSITIONS, VOCAB, generator=generator)
    positions = torch.randperm(NUM_POSITIONS, generator=generator)[:NUM_TOKENS]
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    weights = torch.randn(2, NUM_TOKENS, generator=generator)
    return logits, positions, targets, weights


def reference(logits=None):
    """Plain log_softmax in float64: values of both, and the gradient of their weighted sum."""
    whole, positions, targets, weights = inputs()
    logits = (whole if logits is None else logits).double().requires_grad_(True)
    log_p = torch.log_softmax(logits[positions] / TEMPERATURE, dim=-1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p.clamp_min(-1e300)).sum(-1)
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), logits.grad


def scores(logits, tp, **options):
    _, positions, targets, weights = inputs()
    logits = logits.clone().requires_grad_(True)
    log_probs, entropy = score_tokens(logits, positions, targets, tp=tp, temperature=TEMPERATURE, **options)
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), logits.grad


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        # float32 softmax of logits up to about 20: a few units of 2**-24 relative to that.
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("chunk_size", [-1, 1, 3, NUM_TOKENS, 1000])
def test_values_and_gradients_do_not_depend_on_chunks(chunk_size):
    assert_close(scores(inputs()[0], SINGLE, chunk_size=chunk_size), reference())


def test_an_entropy_that_is_only_logged_has_no_gradient():
    logits, positions, targets, _ = inputs()
    leaf = logits.clone().requires_grad_(True)
    log_probs, entropy = score_tokens(
        leaf, positions, targets, tp=SINGLE, temperature=TEMPERATURE, entropy_requires_grad=False
    )
    assert not entropy.requires_grad
    log_probs.sum().backward()
    plain = logits.double().requires_grad_(True)
    torch.log_softmax(plain[positions] / TEMPERATURE, -1).gather(-1, targets[:, None]).sum().backward()
    assert torch.allclose(leaf.grad.double(), plain.grad, atol=5e-6)


def test_rows_that_are_not_scored_are_not_read():
    logits, positions, *_ = inputs()
    others = torch.ones(NUM_POSITIONS, dtype=torch.bool)
    others[positions] = False
    expected = scores(logits, SINGLE)
    spoiled = logits.clone()
    spoiled[others] = float("nan")
    found = scores(spoiled, SINGLE)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert (found[2][others] == 0).all()


def test_no_tokens():
    logits = inputs()[0].clone().requires_grad_(True)
    none = torch.zeros(0, dtype=torch.int64)
    log_probs, entropy = score_tokens(logits, none, none, tp=SINGLE)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert (logits.grad == 0).all()


def test_bf16_logits_are_scored_in_float32():
    logits = inputs()[0].bfloat16()
    log_probs, entropy, gradient = scores(logits, SINGLE)
    exact = reference(logits)
    assert gradient.dtype == torch.bfloat16
    assert_close((log_probs, entropy), exact[:2])
    # Computed in float32, then rounded to 8 bits.
    assert torch.allclose(gradient.double(), exact[2], rtol=2**-8, atol=1e-6)


IMPOSSIBLE = {"-inf": float("-inf"), "lowest": torch.finfo(torch.float32).min}


def with_impossible(low, columns):
    """The logits with some columns so low that they cannot be chosen, unless they are a token's target."""
    logits, positions, targets, _ = inputs()
    is_target = torch.zeros(NUM_POSITIONS, VOCAB, dtype=torch.bool)
    is_target[positions, targets] = True
    chosen = torch.zeros(VOCAB, dtype=torch.bool)
    chosen[columns] = True
    return logits.masked_fill(chosen & ~is_target, low)


@pytest.mark.parametrize("low", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_cannot_be_chosen_have_no_part(low, dtype):
    logits = with_impossible(low, range(0, VOCAB, 3)).to(dtype)
    log_probs, entropy, gradient = scores(logits, SINGLE, chunk_size=3)
    expected = reference(logits)
    assert_close((log_probs, entropy), expected[:2])
    assert torch.allclose(gradient.double(), expected[2], rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=5e-6)


def test_a_target_that_cannot_be_chosen_has_a_log_prob_of_minus_infinity():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    log_probs, entropy = score_tokens(logits, torch.tensor([0]), torch.tensor([2]), tp=SINGLE)
    log_probs.sum().backward()
    assert log_probs.item() == float("-inf") and entropy.item() == pytest.approx(math.log(2))
    assert logits.grad.tolist() == [[-0.5, -0.5, 1.0]]


@pytest.mark.parametrize("target", [-1, VOCAB, 1000])
def test_a_target_outside_the_vocabulary_has_no_log_prob(target):
    logits = inputs()[0]
    log_probs, _ = score_tokens(logits, torch.arange(3), torch.tensor([1, target, 2]), tp=SINGLE)
    assert log_probs.isnan().tolist() == [False, True, False]


def _score_share(rank, world_size, directory, logits):
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    tp = GroupInfo(rank, world_size, dist.group.WORLD)
    share = logits.chunk(world_size, dim=-1)[rank]
    torch.save(scores(share, tp, chunk_size=7), f"{directory}/{rank}.pt")
    dist.destroy_process_group()


WHOLE_SHARE = range(VOCAB // 3)
"""The columns of the first of three ranks."""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("low", [None, float("-inf")])
def test_vocabulary_split_over_tensor_parallel_ranks(world_size, low, tmp_path):
    logits = inputs()[0] if low is None else with_impossible(low, WHOLE_SHARE)
    mp.start_processes(_score_share, (world_size, str(tmp_path), logits), nprocs=world_size, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
    log_probs, entropy, gradient = reference(logits)
    for share in found:
        assert_close(share[:2], (log_probs, entropy))
    assert_close([torch.cat([share[2] for share in found], dim=-1)], [gradient])
