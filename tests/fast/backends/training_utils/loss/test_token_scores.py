"""Log-probs and entropies against float64 log_softmax, by value and gradient, whole and split over the vocabulary."""

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


def reference():
    """Plain log_softmax in float64: values of both, and the gradient of their weighted sum."""
    logits, positions, targets, weights = inputs()
    logits = logits.double().requires_grad_(True)
    log_p = torch.log_softmax(logits[positions] / TEMPERATURE, dim=-1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
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
    _, positions, targets, _ = inputs()
    log_probs, entropy = score_tokens(logits, positions, targets, tp=SINGLE)
    exact = torch.log_softmax(logits.double()[positions], -1)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(log_probs.double(), exact.gather(-1, targets[:, None])[:, 0], atol=1e-5)


def _score_share(rank, world_size, directory):
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    tp = GroupInfo(rank, world_size, dist.group.WORLD)
    share = inputs()[0].chunk(world_size, dim=-1)[rank]
    torch.save(scores(share, tp, chunk_size=7), f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_vocabulary_split_over_tensor_parallel_ranks(world_size, tmp_path):
    mp.start_processes(_score_share, (world_size, str(tmp_path)), nprocs=world_size, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
    log_probs, entropy, gradient = reference()
    for share in found:
        assert_close(share[:2], (log_probs, entropy))
    assert_close([torch.cat([share[2] for share in found], dim=-1)], [gradient])
