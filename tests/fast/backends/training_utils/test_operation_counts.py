"""What speed rests on, without a clock: operations do not grow with the rows, none waits, memory is bounded."""

import itertools

import pytest
import torch

from miles.backends.training_utils import cp_utils, loss_aggregation
from miles.backends.training_utils.loss_aggregation import make_reducer, mask_sums
from miles.backends.training_utils.loss_hub import token_scores
from miles.backends.training_utils.loss_hub.token_scores import score_tokens
from miles.backends.training_utils.parallel import SINGLE, set_parallel_state
from tests.benchmarks.common import PeakStorage
from tests.fast.backends.training_utils.layout import simulated_state
from tests.fast.backends.training_utils.operations import Operations

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")


def rows(num_rows, dtype=torch.int64):
    """Masks of one to seven tokens, every third of which is masked; responses after two tokens of prompt."""
    lengths = [1 + i % 7 for i in range(num_rows)]
    masks = [(torch.arange(length) % 3 != 1).to(dtype) for length in lengths]
    return [length + 2 for length in lengths], lengths, masks


CHOICES = [{}, {"calculate_per_token_loss": True}, {"constant_divisor": 8.0}, {"sample_denoms": 3.0}]


def operations(num_rows, cp_rank, cp_size, choice, device):
    """Names of the operations of building a reducer, of one metric, and of its backward."""
    set_parallel_state(simulated_state(1, cp_size, cp_rank=cp_rank))
    total_lengths, lengths, masks = rows(num_rows)
    if "sample_denoms" in choice:
        choice = {"sample_denoms": torch.full((num_rows,), choice["sample_denoms"], device=device)}
    masks = [mask.to(device) for mask in masks]
    local = cp_utils.get_local_response_loss_masks(total_lengths, lengths, masks)
    values = torch.ones(sum(map(len, local)), requires_grad=True, device=device)
    parts = []
    with Operations() as build:
        reducer = cp_utils.get_sum_of_sample_mean(total_lengths, lengths, masks, **choice)
        first = reducer(values)
    parts.append(build.names)
    metric = values.detach()
    with Operations() as reduce:
        reducer(metric)
    parts.append(reduce.names)
    with Operations() as backward:
        first.backward()
    parts.append(backward.names)
    return parts


def without_device(tensor):
    """`torch.tensor` that refuses to fill a device from a list, since that waits for the device."""

    def checked(*args, **kwargs):
        assert kwargs.get("device") is None, "send() does not wait"
        return tensor(*args, **kwargs)

    return checked


@pytest.mark.parametrize(("cp_rank", "cp_size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "".join(choice) or "sample mean")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_reducer_over_4096_rows_takes_the_operations_of_one_over_4(device, choice, cp_rank, cp_size, monkeypatch):
    """A meta tensor has no values, so whoever waits for one fails: it stands for an accelerator here."""
    monkeypatch.setattr(torch, "tensor", without_device(torch.tensor))
    few, many = (operations(num_rows, cp_rank, cp_size, choice, device) for num_rows in (4, 4096))
    assert few == many
    build, reduce, backward = few
    assert not {"_to_copy!", "copy_!"} & {*build, *reduce, *backward}, "a copy to the device that waits for it"
    waits = [name for name in build + reduce + backward if name in WAITS]
    assert waits == (["_local_scalar_dense"] * 2 if device == "cpu" else []), "a look at each of two sums, on the CPU"
    assert len(build) < 40 and len(reduce) <= 6
    assert [name for name in backward if name.startswith("mul")] == ["mul"], "one pass over the values"


def test_slices_and_counts_of_4096_rows_take_the_operations_of_4():
    found = []
    for num_rows in (4, 4096):
        set_parallel_state(simulated_state(1, 2, cp_rank=1))
        total_lengths, lengths, masks = rows(num_rows)
        with Operations() as counted:
            cp_utils.get_local_response_loss_masks(total_lengths, lengths, masks)
            mask_sums(masks)
        found.append(counted.names)
    assert found[0] == found[1]


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_rows_sliced_together_are_rows_sliced_one_by_one(cp_size, qkv_format):
    """Every prompt and response length up to seven, none included; entries are distinct, so an order mistake shows."""
    shapes = list(itertools.product(range(8), range(8)))
    marks = [torch.arange(100 * i, 100 * i + response) for i, (_, response) in enumerate(shapes)]
    totals, responses = [prompt + response for prompt, response in shapes], [response for _, response in shapes]
    padded = [total + 3 for total in totals] if qkv_format == "bshd" else None
    for cp_rank in range(cp_size):
        set_parallel_state(simulated_state(1, cp_size, cp_rank=cp_rank))
        together = cp_utils.get_local_response_loss_masks(totals, responses, marks, qkv_format, padded)
        for i, found in enumerate(together):
            alone = cp_utils.slice_log_prob_with_cp(
                marks[i], totals[i], responses[i], qkv_format, padded[i] if padded else None
            )
            assert found.tolist() == alone.tolist(), (cp_rank, shapes[i])


@pytest.mark.parametrize("cp_size", [1, 2])
def test_no_rows_have_no_slices(cp_size):
    set_parallel_state(simulated_state(1, cp_size))
    assert cp_utils.get_local_response_loss_masks([], [], []) == []


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_mask_that_does_not_cover_its_response_is_refused(cp_size):
    set_parallel_state(simulated_state(1, cp_size))
    with pytest.raises(ValueError, match="one value for each of 3 response tokens, got 2"):
        cp_utils.get_sum_of_sample_mean([5, 6], [2, 3], [torch.ones(2), torch.ones(2)])


def test_two_metrics_of_one_reducer_keep_their_own_sums_and_gradients():
    """They share scratch memory, which must not be what a result or a gradient lives in."""
    one, two = torch.tensor([1.0, 2.0, 4.0], requires_grad=True), torch.tensor([8.0, 16.0, 32.0], requires_grad=True)
    reducer = make_reducer([torch.tensor([1, 0, 1]).double()], denominators=torch.tensor([2.0]))
    first, second = reducer(one), reducer(two)
    (3 * first + second).backward()
    assert (first.item(), second.item()) == (2.5, 20.0)
    assert one.grad.tolist() == [1.5, 0, 1.5] and two.grad.tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("values_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_mask_may_weigh_tokens(values_dtype):
    values = torch.tensor([1.0, 2.0, 4.0], dtype=values_dtype, requires_grad=True)
    result = make_reducer([torch.tensor([0.5, 0.0, 0.25])], denominators=torch.tensor([2.0]))(values)
    result.backward()
    assert result.item() == (0.5 * 1 + 0.25 * 4) / 2
    assert values.grad.dtype == values_dtype and values.grad.tolist() == [0.25, 0, 0.125]


@pytest.mark.parametrize("values_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nan_at_masked_positions_stays_out_on_an_accelerator_too(values_dtype, monkeypatch):
    monkeypatch.setattr(loss_aggregation, "DEVICES_WITHOUT_WAIT", ())
    values = torch.tensor([1.0, float("nan"), 4.0], dtype=values_dtype, requires_grad=True)
    result = make_reducer([torch.tensor([1, 0, 1])], denominators=torch.tensor([2.0]))(values)
    result.backward()
    assert result.item() == 2.5 and values.grad.tolist() == [0.5, 0, 0.5]
    assert result.dtype == torch.promote_types(values_dtype, torch.float32)


@pytest.mark.parametrize("size", [(8, 4096), (64, 1024)])
def test_error_against_float64_is_at_most_twice_that_of_the_loop(size):
    generator = torch.Generator().manual_seed(3)
    mine, loops = [], []
    for _ in range(100):
        lengths = torch.randint(size[1] // 16, size[1], (size[0],), generator=generator).tolist()
        masks = [(torch.rand(length, generator=generator) < 0.9).to(torch.int64) for length in lengths]
        values = torch.randn(sum(lengths), generator=generator)
        parts = list(zip(values.split(lengths), masks, strict=True))
        exact = sum((row.double() * mask).sum() / mask.sum() for row, mask in parts)
        loops.append(abs(sum((row * mask).sum() / mask.sum() for row, mask in parts) - exact).item())
        reducer = cp_utils.get_sum_of_sample_mean([length + 1 for length in lengths], lengths, masks)
        mine.append(abs(reducer(values) - exact).item())
    assert sorted(mine)[50] <= 2 * sorted(loops)[50]


def peak_of_scores(logits):
    """The most that scoring takes beside the logits, and these, in bytes."""
    positions = torch.arange(logits.size(0), device=logits.device)
    targets = positions % logits.size(1)
    with PeakStorage(logits, positions, targets) as storage:
        log_probs, entropy = score_tokens(logits, positions, targets, tp=SINGLE)
        (log_probs.sum() + entropy.sum()).backward()
    return storage.peak, logits.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 32768), (8192, 32768), (2048, 151936)])
@pytest.mark.parametrize("limit", [*token_scores.CHUNK_ELEMENTS.values(), token_scores.ACCELERATOR_CHUNK_ELEMENTS])
def test_scores_hold_little_more_than_the_gradient_beside_the_logits(limit, shape, dtype, monkeypatch):
    """Beside the gradient only a few buffers of one chunk. Meta tensors have sizes alone, and take no time."""
    monkeypatch.setitem(token_scores.CHUNK_ELEMENTS, "meta", limit)
    peak, size = peak_of_scores(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True))
    assert size <= peak <= 1.3 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_log_softmax_holds_three_times_the_logits(dtype):
    """The measure sees what it should, and sees on a CPU what it sees on meta tensors."""
    on_cpu, on_meta = (torch.zeros(256, 4096, dtype=dtype, device=device) for device in ("cpu", "meta"))
    assert peak_of_scores(on_cpu.clone().requires_grad_()) == peak_of_scores(on_meta.clone().requires_grad_())
    plain, targets = on_cpu.requires_grad_(), torch.arange(256)
    size = plain.untyped_storage().nbytes()
    with PeakStorage(plain) as storage:
        torch.log_softmax(plain.float(), -1).gather(-1, targets[:, None]).sum().backward()
    assert storage.peak >= 3 * size
