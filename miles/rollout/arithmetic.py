"""The embedded task: add up the place values of a number, with credit for every character in its place.

`300+40+7=` is answered by `347`, `300+7=` by `307`. The digits never carry, so a tiny policy learns the task from
scratch within a minute; it still has to find each digit, put in the zeros, and learn when to stop, since answers have
one to three digits.
"""

from itertools import zip_longest

import numpy as np

MAX_DIGITS = 3
CHARACTERS = "0123456789+="
MAX_PROMPT_LENGTH = len("300+40+7=")
MAX_RESPONSE_LENGTH = MAX_DIGITS + 1
"""The longest answer and the end token."""


def place_values(number: int) -> str:
    """Return the problem whose answer is `number` (at least 1), such as `300+7=` for 307."""
    digits = str(number)
    terms = [digit + "0" * (len(digits) - 1 - place) for place, digit in enumerate(digits) if digit != "0"]
    return "+".join(terms) + "="


def draw_problems(seed: int, rollout_id: int, count: int) -> list[tuple[str, str]]:
    """Return `count` pairs of prompt and answer that depend on `seed` and `rollout_id` alone.

    Args:
        seed: The run's rollout seed, at least 0.
        rollout_id: Which rollout the prompts are for, at least 0.
        count: Number of problems.

    Returns:
        Pairs such as `("300+40+7=", "347")`; a third each are drawn below 10, 100 and 1000.
    """
    generator = np.random.default_rng([seed, rollout_id])
    num_digits = generator.integers(1, MAX_DIGITS + 1, size=count)
    numbers = generator.integers(1, 10**num_digits)
    return [(place_values(number), str(number)) for number in numbers.tolist()]


def arithmetic_credit(response: str, answer: str, *, ended: bool) -> float:
    """Return the share of characters that stand in their right place, the end of the response counted as one.

    `matches / max(len(answer) + 1, len(response) + ended)`: 1 only for the answer followed by the end.

    Args:
        response: Generated text without the end token.
        answer: The right digits.
        ended: Whether the policy ended the response itself.

    Returns:
        Credit in [0, 1].
    """
    given = [*response, *([None] if ended else [])]
    wanted = [*answer, None]
    matches = sum(a == b for a, b in zip_longest(given, wanted, fillvalue=""))
    return matches / max(len(given), len(wanted))
