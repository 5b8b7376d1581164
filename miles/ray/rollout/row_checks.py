"""What training needs of a row, wherever it comes from.

Values are looked at as numpy arrays, one array for each row, so that long rows cost little. A list that is right as it
is comes back as it is, and not as a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from numbers import Integral
from typing import Any

import numpy as np

from miles.utils.errors import UserError
from miles.utils.number_lists import plain_numbers

LARGEST = float(np.finfo(np.float32).max)
"""The largest number that training can hold, about 3.4e38."""

WEIGHT_RANGE = (1e-20, 1e20)
"""Loss weights other than 0; beyond, products with losses and their sums would leave float32."""


def check_id(name: str, field: str, value: Any) -> None:
    """Check that an identity of a sample is an integer or None.

    Raises:
        UserError: it is something else.
    """
    if value is not None and not _is_integer(value):
        raise unfit(f"{name} has {field}", value, "it must be an integer or None", with_type=True)


def check_tokens(name: str, tokens: Any, response_length: Any) -> None:
    """Check a row's token ids, and that they are no fewer than its response's.

    Args:
        name: What messages call the row.
        tokens: Prompt and response, integers.
        response_length: How many of them are the response.

    Raises:
        UserError: naming the row.
    """
    if not _is_integer(response_length):
        advice = "it must be an integer, the number of response tokens"
        raise unfit(f"{name} has response_length", response_length, advice, with_type=True)
    if plain_numbers(tokens, int) is None:
        checked_values(name, "tokens", tokens, "iu", "integers")
    if not 0 <= response_length <= len(tokens):
        raise UserError(
            f"{name} has {len(tokens)} tokens for a response_length of {response_length}; "
            "tokens must hold the prompt followed by the response"
        )


def checked_loss_mask(name: str, mask: Any, response_length: int) -> list[int]:
    """Return a row's mask as 0/1 integers; a list of these is returned itself.

    Args:
        name: What messages call the row.
        mask: 0/1 or truth values.
        response_length: How many it must have.

    Raises:
        UserError: naming the row.
    """
    allowed = "0 (masked) and 1 (active)"
    plain = plain_numbers(mask, int)
    values = checked_values(name, "loss_mask", mask, "iubf", allowed) if plain is None else plain
    advice = "a mask needs exactly one entry for each response token"
    _check_length(name, f"a loss_mask of length {len(values)}", values, response_length, advice)
    _check_each(name, "loss_mask", values, (values == 0) | (values == 1), f"; a mask holds {allowed}")
    return values.astype(np.int64).tolist() if plain is None else mask


def checked_log_probs(name: str, log_probs: Any, mask: Sequence[int]) -> list[float]:
    """Return a row's rollout log-probs, one for each response token, finite wherever the mask is set.

    A list of floats is returned itself.

    Args:
        name: What messages call the row.
        log_probs: Nats.
        mask: The row's mask, as `checked_loss_mask` returns it.

    Raises:
        UserError: naming the row.
    """
    advice = "give one for each response token on every sample of the rollout, or on none"
    if log_probs is None:
        raise UserError(f"{name} has no rollout_log_probs, unlike another sample; {advice}")
    values, as_list = _floats(name, "rollout_log_probs", log_probs, len(mask), advice)
    right = np.abs(values) <= LARGEST
    if not right.all():
        right |= ~np.asarray(mask, dtype=bool)
    advice = " at an active token; log-probs must be finite (in float32) wherever the mask is 1"
    _check_each(name, "rollout_log_probs", values, right, advice)
    return as_list


def checked_loss_weights(name: str, weights: Any, response_length: int) -> list[float]:
    """Return a row's loss weights, one for each response token, masked or not; a list of floats is returned itself.

    Args:
        name: What messages call the row.
        weights: Each 0 or in `WEIGHT_RANGE`.
        response_length: How many there must be.

    Raises:
        UserError: naming the row.
    """
    advice = "give one for each response token, masked ones included, or None for weights of 1"
    values, as_list = _floats(name, "loss_weights", weights, response_length, advice)
    low, high = WEIGHT_RANGE
    right = (values == 0) | ((values >= low) & (values <= high))
    advice = f"; a weight must be 0, or a number from {low:g} to {high:g}, at masked tokens too"
    _check_each(name, "loss_weights", values, right, advice)
    return as_list


def finite_number(value: Any, what: str, *, hint: str = "") -> float:
    """Return a number as a float: any that float32 can hold, a truth value or a 0-d tensor among them.

    Args:
        value: The number.
        what: How the message begins, before the value.
        hint: How it ends.

    Raises:
        UserError: it is no number, or not finite, or too large.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several values
        number = math.nan
    if not abs(number) <= LARGEST:
        raise unfit(what, value, f"it must be a finite number, at most {LARGEST:.1e} in magnitude{hint}")
    return number


def checked_values(name: str, field: str, values: Any, kinds: str, allowed: str) -> np.ndarray:
    """Return the values of a list (or a 1-D array or tensor) as an array, after checking their type.

    Args:
        name: What messages call the row.
        field: What they call the list.
        values: The list.
        kinds: Letters of numpy's `dtype.kind` that are admitted.
        allowed: What they call such values.

    Raises:
        UserError: it is no list, or one of its values is of another type.
    """
    array = _as_array(values)
    if array is None:
        raise unfit(f"{name} has {field}", values, f"it must be a flat list of {allowed}", with_type=True)
    if len(array) and array.dtype.kind not in kinds:
        place = next((place for place, value in enumerate(values) if not _is_of_kind(value, kinds)), None)
        what = f"{field} of type {array.dtype}" if place is None else f"{field}[{place}] = {short(values[place])}"
        raise UserError(f"{name} has {what}; it must be a list of {allowed}")
    return array


def unfit(what: str, value: Any, advice: str, *, with_type: bool = False) -> UserError:
    """Return the error that says what a value is and what it must be.

    Args:
        what: How the message begins, before the value.
        value: The value.
        advice: What follows it.
        with_type: Whether to name the value's type.
    """
    return UserError(f"{what} {short(value)}{f' ({type(value).__name__})' if with_type else ''}; {advice}")


def short(value: Any) -> str:
    """Return a value as messages show it: on one line, shortened where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _floats(name: str, field: str, given: Any, size: int, advice: str) -> tuple[np.ndarray, list[float]]:
    """Return a row's floats, checked in type and number, as an array and as a list, the given one where it will do."""
    plain = plain_numbers(given, float)
    values = checked_values(name, field, given, "iuf", "numbers").astype(np.float64) if plain is None else plain
    _check_length(name, f"{len(values)} {field}", values, size, advice)
    return values, values.tolist() if plain is None else given


def _check_length(name: str, what: str, values: Sized, size: int, advice: str) -> None:
    if len(values) != size:
        raise UserError(f"{name} has {what} for a response_length of {size}; {advice}")


def _check_each(name: str, field: str, values: np.ndarray, right: np.ndarray, advice: str) -> None:
    if not right.all():
        index = int(right.argmin())
        raise UserError(f"{name} has {field}[{index}] = {values[index].item()!r}{advice}")


def _as_array(values: Any) -> np.ndarray | None:
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    if not isinstance(values, (list, tuple, np.ndarray)):
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # rows of unequal lengths, tensors that numpy cannot read
        return np.full(len(values), None)  # of a type that no check admits
    return array if array.ndim == 1 else None


def _is_of_kind(value: Any, kinds: str) -> bool:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return array.ndim == 0 and array.dtype.kind in kinds


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
