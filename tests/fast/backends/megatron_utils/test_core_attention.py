"""Attention over packed rows against softmax written out token by token, on one rank and on two context-parallel."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from miles.backends.training_utils.cp_utils import local_length, slice_with_cp
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from tests.benchmarks.common import PeakStorage
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.backends.megatron_utils.worlds import model

HEADS, WIDTH = 2, 3
LENGTHS = [5, 1, 12, 7, 2]


def attend(query, key, value, row_lengths):
    attention = model.PackedCoreAttention(model.TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2))
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, *row_lengths]).cumsum(0, dtype=torch.int32))
    return attention(query, key, value, None, packed_seq_params=packed)


def whole_rows(seed, lengths):
    """Query, key, value and weight of every token, nested lists of floats: rows x tokens x heads x width."""
    rng = random.Random(seed)
    return [
        [[[[rng.gauss(0, 1.5) for _ in range(WIDTH)] for _ in range(HEADS)] for _ in range(n)] for n in lengths]
        for _ in range(4)
    ]


def oracle(lengths, inputs):
    """Outputs, and gradients of their weighted sum by query, key and value: float64, one token after another."""
    leaves = [[torch.tensor(row, dtype=torch.float64) for row in rows] for rows in inputs]
    for rows in leaves[:3]:
        for row in rows:
            row.requires_grad_()
    total, outputs = 0.0, []
    for query, key, value, weight in zip(*leaves, strict=True):
        output = torch.zeros_like(query)
        for t in range(query.size(0)):
            for head in range(HEADS):
                scores = [(query[t, head] * key[s, head]).sum() / math.sqrt(WIDTH) for s in range(t + 1)]
                exps = [score.exp() for score in scores]
                mixed = sum(e * value[s, head] for s, e in enumerate(exps)) / sum(exps)
                total = total + (mixed * weight[t, head]).sum()
                output[t, head] = mixed.detach()
        outputs.append(output)
    total.backward()
    return outputs, *([row.grad for row in rows] for rows in leaves[:3])


def open_cp(cp_size):
    if cp_size > 1:
        dist.init_process_group("gloo")
    rank, group = (dist.get_rank(), dist.group.WORLD) if cp_size > 1 else (0, None)
    set_parallel_state(ParallelState(cp=GroupInfo(rank, cp_size, group)))


def run(lengths, inputs, cp_size):
    """Return one rank's packed outputs and gradients with the expected ones sliced like them."""
    open_cp(cp_size)
    sizes = [local_length(n) * cp_size for n in lengths]

    def pack(rows, fill):
        padded = [
            torch.cat([torch.tensor(row, dtype=torch.float64), torch.full((size - len(row), HEADS, WIDTH), fill)])
            for row, size in zip(rows, sizes, strict=True)
        ]
        return torch.cat([slice_with_cp(row, 0) for row in padded])

    query, key, value = (pack(rows, fill=1e3).requires_grad_() for rows in inputs[:3])  # padding must not be seen
    weight = pack(inputs[3], fill=0.0)
    output = attend(query, key, value, sizes)
    (output * weight.flatten(1)).sum().backward()
    places = torch.cat([slice_with_cp(torch.arange(n) + 100 * i, -1) for i, n in enumerate(lengths)])
    found = [output.detach().view(query.shape), query.grad, key.grad, value.grad]
    expected = oracle(lengths, inputs)
    dist.is_initialized() and dist.destroy_process_group()
    return [
        (ours[at].numpy(), rows[place // 100][place % 100].numpy())
        for ours, rows in zip(found, expected, strict=True)
        for at, place in enumerate(places.tolist())
        if place >= 0
    ]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("lengths", [LENGTHS, [1], [9]])
def test_values_and_gradients(cp_size, lengths):
    inputs = whole_rows(7, lengths)
    pairs = [pair for rank in run_ranks(lambda: run(lengths, inputs, cp_size), cp_size) for pair in rank]
    assert len(pairs) == 4 * sum(lengths)
    for found, wanted in pairs:
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-11)


def peak_bytes(num_rows, row_length, cp_size):
    """The most that the forward and backward pass of a micro-batch holds beside its inputs, on one rank."""
    open_cp(cp_size)
    tensors = [torch.randn(num_rows * row_length // cp_size, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    with PeakStorage(*tensors) as storage:
        attend(*tensors, [row_length] * num_rows).sum().backward()
    dist.is_initialized() and dist.destroy_process_group()
    return storage.peak


@pytest.mark.parametrize("cp_size", [1, 2])
def test_memory_grows_with_tokens_and_not_with_their_square(cp_size):
    two, eight = (max(run_ranks(lambda n=n: peak_bytes(n, 96, cp_size), cp_size)) for n in (2, 8))
    assert eight < 5 * two  # a mask of the whole micro-batch makes it 16
