"""Lists of plain numbers: told apart from any other list exactly, and read exactly."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.utils.number_lists import flat_tensor, plain_numbers, smallest_and_largest


class Int(int):
    """No int to a check of exact types."""


OTHERS = (
    *(True, None, "1", b"i\x01\x00\x00\x00", [1], (1,), {1}, 1j, Decimal(1), Int(1)),
    *(2**31, -(2**31) - 1, 10**30, np.int64(1), np.float64(1), torch.tensor(1)),
)

elements = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.floats(allow_nan=True), st.sampled_from(OTHERS), st.binary(), st.integers()
)


def is_plain(value, kind):
    return type(value) is kind and (kind is float or -(2**31) <= value < 2**31)


@given(values=st.one_of(st.lists(elements), st.lists(st.integers(0, 1)), st.lists(st.floats())))
def test_a_list_is_plain_when_each_element_is(values):
    for kind in (int, float):
        numbers = plain_numbers(values, kind)
        assert (numbers is not None) == all(is_plain(value, kind) for value in values)
        if numbers is not None:
            assert list(map(repr, numbers.tolist())) == list(map(repr, values))  # repr: NaN, and the sign of a zero


@pytest.mark.parametrize("values", [None, 1, "11", (1, 1), np.ones(2, dtype=np.int64), torch.ones(2), range(2)])
def test_what_is_no_list_is_not_plain(values):
    assert plain_numbers(values, int) is None and plain_numbers(values, float) is None


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_one_other_element_is_found_anywhere(other, position):
    for kind, number in ((int, 7), (float, 7.0)):
        values = [number] * 3
        values[position] = other
        assert plain_numbers(values, kind) is None


def test_flat_tensors_are_those_of_a_loop():
    """1e300 overflows float32; 16777217 is odd and above 2^24; 0.1 is rounded once."""
    rows = [
        *([1, 0], [], [True, False], (1, 0), np.array([0, 1], dtype=np.uint8), torch.tensor([1, 1])),
        *([2**40, -1], [16777217], [1.9, -1.9], [np.int64(3), 4], [torch.tensor(5)]),
    ]
    floats = [[0.1, -math.inf], [1, 0.5], [], [1e300], torch.tensor([0.5], dtype=torch.bfloat16), np.float32([0.1])]
    for given_rows, dtype in ((rows, torch.int64), (floats, torch.float32)):
        flat = flat_tensor(given_rows, dtype)
        assert flat.dtype == dtype
        assert flat.tolist() == torch.tensor([value for row in given_rows for value in row], dtype=dtype).tolist()
    assert flat_tensor([], torch.int64).shape == (0,)
    assert math.isnan(flat_tensor([[math.nan]], torch.float32).item())


@given(values=st.lists(st.integers(), min_size=1))
def test_smallest_and_largest(values):
    for row in (values, tuple(values), [value % 1000 for value in values]):
        assert smallest_and_largest(row) == (min(row), max(row))
