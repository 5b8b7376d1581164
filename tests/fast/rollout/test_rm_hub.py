import asyncio
import math
import sys
from argparse import Namespace
from decimal import Decimal
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from miles.rollout.rm_hub import get_reward_function, last_number, set_rewards
from miles.utils.errors import UserError
from miles.utils.types import Sample


def make_args(**changes: Any) -> Namespace:
    return Namespace(**{"rm_type": None, "custom_rm_path": None, "prompt_data": None, "reward_key": None, **changes})


def make_sample(response: str, label: str | None, status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(index=5, group_index=2, response=response, label=label, status=status)


def reward_of(args: Namespace, sample: Sample) -> Any:
    set_rewards(args, [sample])
    return sample.reward


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module, so that a test can give its functions by path."""
    module = ModuleType("a_users_rewards")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 1,234.50 dollars.", "1234.5"),
        ("7 + 8 = 15", "15"),
        ("A: 18.", "18"),
        ("-5", "-5"),
        ("x = -5", "-5"),
        ("(−3)", "-3"),  # U+2212
        ("10-4", "4"),
        ("-$5", "-5"),
        ("$1,000", "1000"),
        ("1,2", "2"),
        ("2.", "2"),
        (".5", "0.5"),
        ("5%", "5"),
        ("a 5kg bag", "5"),
        ("1e3", "1000"),
        ("2.5E-1", "0.25"),
        ("007", "7"),
        ("1,234,567 then", "1234567"),
        ("1e99999999999999999999", "99999999999999999999"),  # no exponent that a decimal can hold
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none at all", "-", ".,."])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("so it is 18.0", "18", 1.0), ("#### 1,000", "1000", 1.0), ("18 or 19", "18", 0.0), ("no idea", "18", 0.0),
     ("0.1", "0.10", 1.0), ("12345678901234567890", "12345678901234567891", 0.0), ("4", "#### 4", 1.0)],
)  # fmt: skip
def test_numeric(response: str, label: str, reward: float) -> None:
    assert reward_of(make_args(rm_type="numeric"), make_sample(response, label)) == reward


def test_numeric_needs_a_number_in_the_label() -> None:
    with pytest.raises(UserError, match=r"sample 5 \(prompt group 2\): label 'many' has no number"):
        reward_of(make_args(rm_type="numeric"), make_sample("3", "many"))


@pytest.mark.parametrize(("response", "reward"), [("Paris", 1.0), (" Paris\n", 1.0), ("paris", 0.0), ("Pari", 0.0)])
def test_exact_match(response: str, reward: float) -> None:
    assert reward_of(make_args(rm_type="exact_match"), make_sample(response, "Paris ")) == reward


def test_the_embedded_task_rewards_itself_with_partial_credit() -> None:
    # "34" for 347: two of the four characters (three digits and the end) are in place, ended or not.
    assert reward_of(make_args(), make_sample("34", "347")) == 0.5
    assert reward_of(make_args(), make_sample("347", "347")) == 1.0
    assert reward_of(make_args(), make_sample("347", "347", Sample.Status.TRUNCATED)) == 0.75


@pytest.mark.parametrize("rm_type", ["arithmetic", "exact_match", "numeric"])
def test_a_missing_label_is_an_error(rm_type: str) -> None:
    with pytest.raises(UserError, match=rf"sample 5 .*has no label, which --rm-type {rm_type} needs.*--label-key"):
        reward_of(make_args(rm_type=rm_type), make_sample("3", None))


def test_prompts_from_a_file_need_a_named_reward() -> None:
    with pytest.raises(UserError, match=r"--prompt-data needs a reward: give --rm-type .* or --custom-rm-path"):
        get_reward_function(make_args(prompt_data="a.jsonl"))


def test_unknown_rm_type() -> None:
    with pytest.raises(
        UserError, match=r"--rm-type must be one of \['arithmetic', 'exact_match', 'numeric'\], got 'f'"
    ):
        get_reward_function(make_args(rm_type="f"))


def test_custom_rewards_take_precedence_and_see_args_and_sample(plugin: ModuleType) -> None:
    plugin.rm = lambda args, sample: len(sample.response) * args.scale
    args = make_args(custom_rm_path="a_users_rewards.rm", rm_type="exact_match", scale=0.5)
    assert reward_of(args, make_sample("abc", None)) == 1.5


def test_asynchronous_custom_rewards_run_together_and_keep_their_order(plugin: ModuleType) -> None:
    everyone_is_here = asyncio.Event()
    waiting = []

    async def rm(args: Namespace, sample: Sample) -> float:
        waiting.append(sample)
        if len(waiting) == 3:
            everyone_is_here.set()
        await asyncio.wait_for(everyone_is_here.wait(), timeout=5)  # one after another would wait in vain
        return float(sample.response)

    plugin.rm = rm
    samples = [make_sample(str(number), None) for number in (2, 0, 1)]
    set_rewards(make_args(custom_rm_path="a_users_rewards.rm"), samples)
    assert [sample.reward for sample in samples] == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", [1, True, np.float32(1), torch.tensor(1.0)], ids=repr)
def test_any_number_becomes_a_float(plugin: ModuleType, reward: Any) -> None:
    plugin.rm = lambda args, sample: reward
    got = reward_of(make_args(custom_rm_path="a_users_rewards.rm"), make_sample("", None))
    assert type(got) is float
    assert got == 1.0


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, -math.inf, None, "1", [1.0], {"a": 1.0}, torch.ones(2), 10**400], ids=repr
)
def test_what_is_no_finite_number_is_an_error(plugin: ModuleType, reward: Any) -> None:
    plugin.rm = lambda args, sample: reward
    with pytest.raises(UserError, match=r"sample 5 \(prompt group 2\): a reward must be a finite number, got"):
        reward_of(make_args(custom_rm_path="a_users_rewards.rm"), make_sample("", None))


def test_reward_key_checks_its_entry_and_keeps_the_others(plugin: ModuleType) -> None:
    args = make_args(custom_rm_path="a_users_rewards.rm", reward_key="acc")
    plugin.rm = lambda args, sample: {"acc": np.float64(0.5), "note": "fine"}
    got = reward_of(args, make_sample("", None))
    assert got == {"acc": 0.5, "note": "fine"}
    assert type(got["acc"]) is float
    for reward, message in [
        ({"acc": math.nan}, "must be a finite number, got nan"),
        ({"other": 1.0}, "with --reward-key acc a reward must be a mapping that has this key"),
        (1.0, "with --reward-key acc a reward must be a mapping that has this key, got 1.0"),
    ]:
        plugin.rm = lambda args, sample, reward=reward: reward
        with pytest.raises(UserError, match=message):
            reward_of(args, make_sample("", None))
