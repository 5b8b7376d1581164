"""Context-parallel slices against a slow walk over positions, and the reducer factory."""

import itertools

import pytest
import torch

from miles.backends.training_utils import cp_utils
from miles.backends.training_utils.parallel import set_parallel_state
from tests.fast import oracle
from tests.fast.backends.training_utils import layout
from tests.fast.oracle import Row

NAN, INF = float("nan"), float("inf")
ROWS = [  # short and high, long and low, partly masked, fully masked; integers and halves, exact in float32
    Row.of([1, 1], [9, -4]),
    Row.of([1, 0, 1, 1, 1, 0, 1, 1], [1, 50, 2, -1, 0, -70, 0.5, 0.25], prompt_length=5),
    Row.of([0, 0, 0], [11, 12, 13], prompt_length=1),
    Row.of([1], [-6], prompt_length=3),
]


def use_cp(cp_rank, cp_size):
    set_parallel_state(layout.simulated_state(1, cp_size, cp_rank=cp_rank))


def zigzag_mask(row, mask, cp_rank, cp_size, padded_length):
    """The mask at the response tokens that the rank's logits predict, walking every position of the padded sequence:
    chunk k of 2 * cp_size belongs to rank k in the first half and to the mirror rank in the second. The first token of
    a row without a prompt, which no position predicts, goes with position 0."""
    chunk = -(-padded_length // (2 * cp_size))
    kept = []
    for position in range(-1, 2 * cp_size * chunk):
        owner = max(position, 0) // chunk
        owner = owner if owner < cp_size else 2 * cp_size - 1 - owner
        t = position + 1 - row.prompt_length
        if owner == cp_rank and 0 <= t < row.response_length:
            kept.append(mask[t])
    return kept


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_slice_of_every_small_shape(cp_size, qkv_format):
    """Every prompt and response length up to eight; mask entries are distinct, so an order mistake shows."""
    for prompt_length, response_length in itertools.product(range(8), range(1, 9)):
        row = Row.of([1] * response_length, [0] * response_length, prompt_length=prompt_length)
        marks = list(range(100, 100 + response_length))
        max_seq_len = row.total_length + 3 if qkv_format == "bshd" else None
        seen = []
        for cp_rank in range(cp_size):
            use_cp(cp_rank, cp_size)
            mine = cp_utils._slice_loss_mask_for_local_cp(
                row.total_length, response_length, torch.tensor(marks), qkv_format, max_seq_len
            ).tolist()
            padded = max_seq_len or row.total_length
            assert mine == zigzag_mask(row, marks, cp_rank, cp_size, padded), (prompt_length, response_length, cp_rank)
            seen += mine
        assert sorted(seen) == marks, "each response token on exactly one rank"


def lengths(rows):
    return [r.total_length for r in rows], [r.response_length for r in rows]


def masks_of(rows, dtype=torch.int64):
    return [torch.tensor(row.mask, dtype=dtype) for row in rows]


def local_values(rows, cp_rank, cp_size, dtype=torch.float32):
    return torch.tensor(
        [float(r.values[t]) for r in rows for _, t in layout.local_response(r, cp_rank, cp_size)], dtype=dtype
    )


def reduce_over_cp(rows, cp_size, **choice):
    """The reducer on each rank's slice, summed over the ranks as the backend would."""
    total = 0.0
    for cp_rank in range(cp_size):
        use_cp(cp_rank, cp_size)
        reducer = cp_utils.get_sum_of_sample_mean(*lengths(rows), masks_of(rows), **choice)
        total += reducer(local_values(rows, cp_rank, cp_size)).item()
    return total


CHOICES = {  # the numerator (1/d_i) sum_t m x of each choice, by the oracle's loops
    "sample": ({}, lambda i, row: max(sum(row.mask), 1)),
    "token": ({"calculate_per_token_loss": True}, lambda i, row: 1),
    "denoms": ({"sample_denoms": torch.tensor([3.0, 8.0, 1.0, 0.5])}, lambda i, row: [3, 8, 1, 0.5][i]),
    "divisor": ({"constant_divisor": 2.5}, lambda i, row: 2.5),
}


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("choice", CHOICES)
def test_reducer_numerators(choice, cp_size):
    keywords, denominator = CHOICES[choice]
    expected = sum(float(row.masked_sum(row.values)) / denominator(i, row) for i, row in enumerate(ROWS))
    assert reduce_over_cp(ROWS, cp_size, **keywords) == pytest.approx(expected, rel=1e-6)


def test_per_token_is_the_fourth_positional_argument_and_denoms_may_be_a_list():
    total_lengths, response_lengths = lengths(ROWS)
    x = local_values(ROWS, 0, 1)
    by_position = cp_utils.get_sum_of_sample_mean(total_lengths, response_lengths, masks_of(ROWS), True, "thd", None)
    assert by_position(x).item() == sum(float(row.masked_sum(row.values)) for row in ROWS)
    listed = [torch.tensor(d) for d in (3.0, 8.0, 1.0, 0.5)]
    from_list = cp_utils.get_sum_of_sample_mean(total_lengths, response_lengths, masks_of(ROWS), sample_denoms=listed)
    assert from_list(x).item() == pytest.approx(5 / 3 + 2.75 / 8 + 0 - 6 / 0.5, rel=1e-6)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_bshd_reduces_like_thd(cp_size):
    """Padding to a common length moves the slices, not the sum."""
    padded = {"qkv_format": "bshd", "max_seq_lens": [16] * len(ROWS)}
    total = 0.0
    for cp_rank in range(cp_size):
        use_cp(cp_rank, cp_size)
        marks = [torch.arange(row.response_length) for row in ROWS]
        reducer = cp_utils.get_sum_of_sample_mean(*lengths(ROWS), masks_of(ROWS), **padded)
        kept = [
            cp_utils._slice_loss_mask_for_local_cp(row.total_length, row.response_length, mark, "bshd", 16)
            for row, mark in zip(ROWS, marks, strict=True)
        ]
        x = torch.tensor([float(row.values[t]) for row, ts in zip(ROWS, kept, strict=True) for t in ts.tolist()])
        total += reducer(x).item()
    expected = sum(float(row.masked_sum(row.values)) / max(sum(row.mask), 1) for row in ROWS)
    assert total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "choices",
    [
        {"calculate_per_token_loss": True, "sample_denoms": torch.ones(4)},
        {"calculate_per_token_loss": True, "constant_divisor": 8.0},
        {"sample_denoms": torch.ones(4), "constant_divisor": 8.0},
        {"calculate_per_token_loss": True, "sample_denoms": torch.ones(4), "constant_divisor": 8.0},
    ],
    ids=lambda choices: "+".join(choices),
)
def test_choices_are_mutually_exclusive(choices):
    with pytest.raises(ValueError, match="mutually exclusive"):
        cp_utils.get_sum_of_sample_mean(*lengths(ROWS), masks_of(ROWS), **choices)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("choice", CHOICES)
def test_what_stands_at_a_masked_position_reaches_neither_sum_nor_gradient(choice, poison):
    keywords, denominator = CHOICES[choice]
    bits = torch.tensor([bit for row in ROWS for bit in row.mask], dtype=torch.bool)
    x = local_values(ROWS, 0, 1)
    x[~bits] = poison
    x.requires_grad_()
    result = cp_utils.get_sum_of_sample_mean(*lengths(ROWS), masks_of(ROWS), **keywords)(x)
    result.backward()
    expected = sum(float(row.masked_sum(row.values)) / denominator(i, row) for i, row in enumerate(ROWS))
    assert result.item() == pytest.approx(expected, rel=1e-6)
    weights = [bit / denominator(i, row) for i, row in enumerate(ROWS) for bit in row.mask]
    assert x.grad.tolist() == pytest.approx(weights, rel=1e-6)


def test_nan_at_an_active_token_is_not_hidden():
    x = local_values(ROWS, 0, 1)
    x[0] = NAN
    assert cp_utils.get_sum_of_sample_mean(*lengths(ROWS), masks_of(ROWS))(x).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("choice", CHOICES)
def test_low_precision_values_are_summed_in_float32(choice, dtype):
    """A thousand ones and a 1/256: in bfloat16 the sum would stop growing at 256."""
    row = Row.of([1] * 1001, [1] * 1000 + [2**-8])
    keywords = dict(CHOICES[choice][0])
    if "sample_denoms" in keywords:
        keywords["sample_denoms"] = torch.tensor([4.0])
    denominator = {"sample": 1001, "token": 1, "denoms": 4, "divisor": 2.5}[choice]
    reducer = cp_utils.get_sum_of_sample_mean(*lengths([row]), masks_of([row]), **keywords)
    result = reducer(local_values([row], 0, 1, dtype))
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx((1000 + 2**-8) / denominator, rel=1e-7)


@pytest.mark.parametrize("mask_dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
def test_mask_dtypes_agree(mask_dtype):
    reducer = cp_utils.get_sum_of_sample_mean(*lengths(ROWS), masks_of(ROWS, mask_dtype))
    expected = float(oracle.value(ROWS, "sample_mean") * len(ROWS))
    assert reducer(local_values(ROWS, 0, 1)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("choice", ["sample", "token", "divisor"])
def test_no_rows_reduce_to_a_zero_that_carries_the_graph(choice):
    x = torch.zeros(0, requires_grad=True)
    result = cp_utils.get_sum_of_sample_mean([], [], [], **CHOICES[choice][0])(x)
    assert torch.is_tensor(result) and result.shape == () and result.item() == 0
    result.backward()


def test_values_that_do_not_fit_the_rows_are_refused():
    reducer = cp_utils.get_sum_of_sample_mean(*lengths(ROWS), masks_of(ROWS))
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        reducer(torch.ones(13))
