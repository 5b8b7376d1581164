"""What training needs of a row, wherever it comes from.

Values are looked at as numpy arrays, one array for each row, so that long rows cost little. A list that is right as it
is comes back as it is, and not as a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        raise UserError(f"{name} has {field} {short(value)} ({type(value).__name__}); it must be an integer or None")


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
        raise UserError(
            f"{name} has response_length {short(response_length)} ({type(response_length).__name__}); it must be an "
            "integer, the number of response tokens"
        )
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
    plain = plain_numbers(mask, int)
    values = checked_values(name, "loss_mask", mask, "iubf", "0 (masked) and 1 (active)") if plain is None else plain
    if len(values) != response_length:
        raise UserError(
            f"{name} has a loss_mask of length {len(values)} for a response_length of {response_length}; "
            "a mask needs exactly one entry for each response token"
        )
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        index = int(wrong.argmax())
        raise UserError(
            f"{name} has loss_mask[{index}] = {values[index].item()!r}; a mask holds 0 (masked) and 1 (active)"
        )
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
    plain = plain_numbers(log_probs, float)
    values = plain
    if plain is None:
        values = checked_values(name, "rollout_log_probs", log_probs, "iuf", "numbers").astype(np.float64)
    if len(values) != len(mask):
        raise UserError(f"{name} has {len(values)} rollout_log_probs for a response_length of {len(mask)}; {advice}")
    wrong = ~(np.abs(values) <= LARGEST)
    if wrong.any():
        wrong &= np.asarray(mask, dtype=bool)
    if wrong.any():
        index = int(wrong.argmax())
        raise UserError(
            f"{name} has rollout_log_probs[{index}] = {values[index].item()} at an active token; "
            "log-probs must be finite (in float32) wherever the mask is 1"
        )
    return values.tolist() if plain is None else log_probs


def checked_loss_weights(name: str, weights: Any, response_length: int) -> list[float]:
    """Return a row's loss weights, one for each response token, masked or not; a list of floats is returned itself.

    Args:
        name: What messages call the row.
        weights: Each 0 or in `WEIGHT_RANGE`.
        response_length: How many there must be.

    Raises:
        UserError: naming the row.
    """
    plain = plain_numbers(weights, float)
    values = plain
    if plain is None:
        values = checked_values(name, "loss_weights", weights, "iuf", "numbers").astype(np.float64)
    if len(values) != response_length:
        raise UserError(
            f"{name} has {len(values)} loss_weights for a response_length of {response_length}; "
            "give one for each response token, masked ones included, or None for weights of 1"
        )
    low, high = WEIGHT_RANGE
    wrong = ~((values == 0) | ((values >= low) & (values <= high)))
    if wrong.any():
        index = int(wrong.argmax())
        raise UserError(
            f"{name} has loss_weights[{index}] = {values[index].item()}; a weight must be 0, or a number from {low:g} "
            f"to {high:g}, at masked tokens too"
        )
    return values.tolist() if plain is None else weights


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
        raise UserError(f"{what} {short(value)}; it must be a finite number, at most {LARGEST:.1e} in magnitude{hint}")
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
        raise UserError(
            f"{name} has {field} {short(values)} ({type(values).__name__}); it must be a flat list of {allowed}"
        )
    if len(array) and array.dtype.kind not in kinds:
        place = next((place for place, value in enumerate(values) if not _is_of_kind(value, kinds)), None)
        what = f"{field} of type {array.dtype}" if place is None else f"{field}[{place}] = {short(values[place])}"
        raise UserError(f"{name} has {what}; it must be a list of {allowed}")
    return array


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


def short(value: Any) -> str:
    """Return a value as messages show it: on one line, cut off where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
