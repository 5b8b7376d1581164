"""Where prompts come from: the embedded task or a JSONL file. Which ones follows from the rollout id alone."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from miles.rollout.arithmetic import MAX_DIGITS, draw_problems, place_values
from miles.rollout.tokenizer import Tokenizer
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import Sample


@dataclass(frozen=True)
class Prompt:
    """One problem.

    Attributes:
        text: What the policy continues.
        label: The reference answer, None where the file has no label key.
        metadata: The other keys of its line, for custom rewards.
    """

    text: str
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSource:
    """Prompt groups by rollout id; without state, so a resumed run needs none.

    Attributes:
        draw: `(rollout_id, count) -> prompts`, the same for the same arguments.
        rollout_batch_size: Prompts in a rollout.
        n_samples_per_prompt: Samples in a prompt group.
    """

    draw: Callable[[int, int], list[Prompt]]
    rollout_batch_size: int
    n_samples_per_prompt: int

    def get_samples(self, rollout_id: int) -> list[list[Sample]]:
        """Return the prompt groups of one rollout, with prompt, label, `group_index` and `index` set.

        Both indices count through the run: group p of rollout r is `r * rollout_batch_size + p`.
        """
        prompts = self.draw(rollout_id, self.rollout_batch_size)
        first_group = rollout_id * self.rollout_batch_size
        return [self._group(first_group + place, prompt) for place, prompt in enumerate(prompts)]

    def _group(self, group_index: int, prompt: Prompt) -> list[Sample]:
        first = group_index * self.n_samples_per_prompt
        return [
            Sample(
                group_index=group_index,
                index=index,
                prompt=prompt.text,
                label=prompt.label,
                metadata=dict(prompt.metadata),
            )
            for index in range(first, first + self.n_samples_per_prompt)
        ]


def build_data_source(args: Options, tokenizer: Tokenizer) -> DataSource:
    """Return the source of prompts: the file `args.prompt_data`, else the embedded arithmetic.

    Args:
        args: Reads prompt_data, input_key, label_key, rollout_shuffle, rollout_seed, rollout_batch_size,
            n_samples_per_prompt, rollout_max_response_len, max_position_embeddings.
        tokenizer: Measures the prompts.

    Raises:
        UserError: the file is missing, empty, or has a line that is not an object with a text under the input key
            (and a text or number under the label key), both of characters that UTF-8 has, or a prompt is too long
            to be answered.
    """
    if args.prompt_data:
        prompts = read_prompts(args.prompt_data, args.input_key, args.label_key)
        checked = [(f"{args.prompt_data}, line {number}", prompt) for number, prompt in prompts.items()]
        shuffle_seed = args.rollout_seed if args.rollout_shuffle else None
        draw = partial(draw_from_list, list(prompts.values()), shuffle_seed)
    else:
        checked = [("the embedded task", Prompt(place_values(10**MAX_DIGITS - 1)))]
        draw = partial(_draw_arithmetic, args.rollout_seed)
    for where, prompt in checked:
        _check_prompt_fits(where, prompt.text, tokenizer, args)
    return DataSource(draw, args.rollout_batch_size, args.n_samples_per_prompt)


def read_prompts(path: str, input_key: str, label_key: str | None) -> dict[int, Prompt]:
    """Read a JSONL file: one object a line, blank lines left out.

    Args:
        path: The file.
        input_key: Key of the prompt text.
        label_key: Key of the reference answer, a text or a number; None reads no labels.

    Returns:
        Prompts by line number, the first line being 1.

    Raises:
        UserError: as `build_data_source` says.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --prompt-data {path}: {error.strerror}") from error
    lines = enumerate(content.splitlines(), start=1)
    prompts = {number: _parse_line(path, number, line, input_key, label_key) for number, line in lines if line.strip()}
    if not prompts:
        raise UserError(f"--prompt-data {path} is empty; expected one JSON object a line")
    return prompts


def draw_from_list(prompts: list[Prompt], shuffle_seed: int | None, rollout_id: int, count: int) -> list[Prompt]:
    """Return `prompts[rollout_id * count : (rollout_id + 1) * count]` of an endless walk through the list.

    Args:
        prompts: All prompts; each pass over them is an epoch.
        shuffle_seed: Orders each epoch anew, by this seed and the epoch's number; None keeps the order of the list.
        rollout_id: Which rollout.
        count: Prompts per rollout.
    """
    epochs, offsets = np.divmod(np.arange(rollout_id * count, (rollout_id + 1) * count), len(prompts))
    orders = {epoch: _epoch_order(len(prompts), shuffle_seed, epoch) for epoch in set(epochs.tolist())}
    return [prompts[orders[epoch][offset]] for epoch, offset in zip(epochs.tolist(), offsets.tolist(), strict=True)]


def _epoch_order(size: int, shuffle_seed: int | None, epoch: int) -> np.ndarray:
    if shuffle_seed is None:
        return np.arange(size)
    return np.random.default_rng([shuffle_seed, epoch]).permutation(size)


def _draw_arithmetic(seed: int, rollout_id: int, count: int) -> list[Prompt]:
    return [Prompt(text, answer) for text, answer in draw_problems(seed, rollout_id, count)]


def _parse_line(path: str, number: int, line: bytes, input_key: str, label_key: str | None) -> Prompt:
    where = f"--prompt-data {path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets within brackets
        raise UserError(f"{where}: not JSON ({error}); expected one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for option, key in (("--input-key", input_key), ("--label-key", label_key)):
        if key is not None and key not in row:
            raise UserError(f"{where}: no key {key!r}; it has {sorted(row)}. Name the right one with {option}")
    text = row[input_key]
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: {input_key!r} must be a text of at least one character, got {text!r}")
    label = None if label_key is None else _label_text(where, label_key, row[label_key])
    _check_encodable(where, input_key, text)
    _check_encodable(where, label_key, label or "")
    return Prompt(text, label, {key: value for key, value in row.items() if key not in (input_key, label_key)})


def _label_text(where: str, label_key: str, label: Any) -> str:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise UserError(f"{where}: {label_key!r} must be a text or a number, got {label!r}")
    return str(label)


def _check_encodable(where: str, key: str | None, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {key!r} has {text[error.start]!r} at character {error.start}, half of a surrogate pair, which "
            "no text can hold alone; write both halves or the character itself"
        ) from error


def _check_prompt_fits(where: str, text: str, tokenizer: Tokenizer, args: Options) -> None:
    try:
        length = len(tokenizer.encode(text))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    longest = args.max_position_embeddings - args.rollout_max_response_len
    if length > longest:
        needed = length + args.rollout_max_response_len
        raise UserError(
            f"{where}: the prompt has {length} tokens, but max_position_embeddings={args.max_position_embeddings} "
            f"less rollout_max_response_len={args.rollout_max_response_len} allows at most {longest}; "
            f"shorten it or raise --max-position-embeddings to {needed}"
        )
