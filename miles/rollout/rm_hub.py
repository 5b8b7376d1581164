"""Rewards: the built-in rules, and custom ones by path."""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from miles.rollout.arithmetic import arithmetic_credit
from miles.utils.errors import UserError
from miles.utils.misc import load_function
from miles.utils.options import Options
from miles.utils.types import Sample

RewardFunction = Callable[[Options, Sample], Any]

# A minus is a sign where no operand stands before it: "-5" and "= -5" are negative, "10-4" ends in 4.
# A comma groups thousands only in threes: "1,234" is one number, "1,2" two. Letters right after are a unit.
NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}.])[-+\N{MINUS SIGN}])?
    [$€£¥]?
    (?P<digits>
        (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ ) (?:\.\d+)?
      | (?<!\d)\.\d+
    )
    (?P<exponent>[eE][-+]?\d{1,3}(?!\w))?
    """,
    re.VERBOSE,
)


def last_number(text: str) -> Decimal | None:
    """Return the last number in `text` as an exact decimal, None where there is none.

    Understood: signs, thousands separated by commas, decimals, exponents, a currency sign before and a unit after.
    """
    matches = list(NUMBER.finditer(text))
    if not matches:
        return None
    found = matches[-1]
    value = Decimal(found["digits"].replace(",", "") + (found["exponent"] or ""))
    return -value if found["sign"] in ("-", "\N{MINUS SIGN}") else value


def arithmetic_reward(args: Options, sample: Sample) -> float:
    """Return `arithmetic_credit` of the response: partial credit in [0, 1] for the embedded task."""
    ended = sample.status is Sample.Status.COMPLETED
    return arithmetic_credit(sample.response, _label(sample, "arithmetic"), ended=ended)


def exact_match_reward(args: Options, sample: Sample) -> float:
    """Return 1.0 where response and label are equal up to surrounding white space, else 0.0."""
    return float(sample.response.strip() == _label(sample, "exact_match").strip())


def numeric_reward(args: Options, sample: Sample) -> float:
    """Return 1.0 where the last number of the response equals the last number of the label, else 0.0.

    Raises:
        UserError: the label has no number.
    """
    wanted = last_number(_label(sample, "numeric"))
    if wanted is None:
        raise UserError(f"{_name(sample)}: label {sample.label!r} has no number, which --rm-type numeric needs")
    return float(last_number(sample.response) == wanted)


REWARDS: dict[str, RewardFunction] = {
    "arithmetic": arithmetic_reward,
    "exact_match": exact_match_reward,
    "numeric": numeric_reward,
}
"""Built-in rewards by `--rm-type`."""


def get_reward_function(args: Options) -> RewardFunction:
    """Return the reward that `args` choose: custom_rm_path first, then rm_type, then the embedded task's own.

    Args:
        args: Reads custom_rm_path, rm_type, prompt_data.

    Raises:
        UserError: prompts come from a file and no reward is named, the name is unknown, or the path does not load.
    """
    if args.custom_rm_path:
        return load_function(args.custom_rm_path)
    if args.rm_type is None and args.prompt_data:
        raise UserError(
            f"--prompt-data needs a reward: give --rm-type (one of {sorted(REWARDS)}) "
            f"or --custom-rm-path module.function"
        )
    rm_type = args.rm_type or "arithmetic"
    if rm_type not in REWARDS:
        raise UserError(f"--rm-type must be one of {sorted(REWARDS)}, got {rm_type!r}")
    return REWARDS[rm_type]


def set_rewards(args: Options, samples: list[Sample]) -> None:
    """Set `reward` on every sample, in place; asynchronous custom rewards run together.

    Raises:
        UserError: a reward is no finite number (or, with args.reward_key, no mapping with one under that key).
    """
    args = Options.of(args)
    reward_function = get_reward_function(args)
    rewards = asyncio.run(_call_all(reward_function, args, samples))
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = _checked_reward(args, sample, reward)


async def _call_all(reward_function: RewardFunction, args: Options, samples: list[Sample]) -> list[Any]:
    async def call(sample: Sample) -> Any:
        reward = reward_function(args, sample)
        return await reward if inspect.isawaitable(reward) else reward

    return await asyncio.gather(*(call(sample) for sample in samples))


def _checked_reward(args: Options, sample: Sample, reward: Any) -> float | dict[str, Any]:
    key = args.reward_key
    if key is None:
        return _finite(sample, reward)
    if not isinstance(reward, Mapping) or key not in reward:
        raise UserError(
            f"{_name(sample)}: with --reward-key {key} a reward must be a mapping that has this key, got {reward!r}"
        )
    return {**reward, key: _finite(sample, reward[key])}


def _finite(sample: Sample, reward: Any) -> float:
    """Return `reward` as a float; numpy and torch scalars are numbers too, texts are not."""
    try:
        value = None if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = None
    if value is None or not math.isfinite(value):
        raise UserError(f"{_name(sample)}: a reward must be a finite number, got {reward!r}")
    return value


def _label(sample: Sample, rm_type: str) -> str:
    if sample.label is None:
        raise UserError(
            f"{_name(sample)} has no label, which --rm-type {rm_type} needs; name its key with --label-key"
        )
    return sample.label


def _name(sample: Sample) -> str:
    return f"sample {sample.index} (prompt group {sample.group_index})"
