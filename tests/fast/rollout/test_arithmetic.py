import re

import pytest

from miles.rollout.arithmetic import (
    CHARACTERS,
    MAX_PROMPT_LENGTH,
    MAX_RESPONSE_LENGTH,
    arithmetic_credit,
    draw_problems,
    place_values,
)


@pytest.mark.parametrize(
    ("number", "problem"), [(7, "7="), (40, "40="), (307, "300+7="), (347, "300+40+7="), (980, "900+80=")]
)
def test_place_values(number: int, problem: str) -> None:
    assert place_values(number) == problem


def test_every_answer_is_the_sum_of_its_prompt() -> None:
    problems = draw_problems(seed=3, rollout_id=0, count=2000)
    for prompt, answer in problems:
        assert re.fullmatch(r"\d+(\+\d+)*=", prompt)
        assert sum(map(int, prompt[:-1].split("+"))) == int(answer)
        assert len(prompt) <= MAX_PROMPT_LENGTH
        assert len(answer) < MAX_RESPONSE_LENGTH
        assert set(prompt + answer) <= set(CHARACTERS)
    lengths = [len(answer) for _, answer in problems]
    # A third of the draws is below 10, another below 100 and the last below 1000: P(one digit) = (1 + 9/99 + 9/999)/3.
    assert lengths.count(1) / 2000 == pytest.approx(0.367, abs=0.04)
    assert lengths.count(3) / 2000 == pytest.approx(0.300, abs=0.04)


def test_problems_depend_on_seed_and_rollout_alone() -> None:
    assert draw_problems(1, 2, 8) == draw_problems(1, 2, 8)
    assert draw_problems(1, 2, 8) != draw_problems(1, 3, 8)
    assert draw_problems(1, 2, 8) != draw_problems(2, 2, 8)


@pytest.mark.parametrize(
    ("response", "ended", "credit"),
    [
        ("347", True, 1.0),
        ("347", False, 3 / 4),  # the end is missing
        ("3479", False, 3 / 4),  # a digit where the end belongs
        ("34", True, 2 / 4),  # two digits stand right, then the end comes too early
        ("47", True, 0.0),  # right digits, wrong places
        ("397", True, 3 / 4),
        ("", True, 0.0),
        ("", False, 0.0),
        ("34777", True, 3 / 6),  # six characters given, three of them right
    ],
)
def test_credit_is_the_share_of_characters_in_place(response: str, ended: bool, credit: float) -> None:
    assert arithmetic_credit(response, "347", ended=ended) == credit
