"""Tokenizers that need no files: UTF-8 bytes, and the few characters of the embedded task."""

from collections.abc import Iterable
from typing import Protocol

from miles.rollout.arithmetic import CHARACTERS
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import Sample

PAD_TEXT = "\N{REPLACEMENT CHARACTER}"
"""How a sampled padding token reads: visible, so that no reward takes the response for one without it."""


class Tokenizer(Protocol):
    """What rollout and model need of a tokenizer."""

    eos_id: int
    pad_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without an end token."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; the end token has none, padding reads `PAD_TEXT`."""


def encode_prompt(tokenizer: Tokenizer, sample: Sample) -> list[int]:
    """Return the token ids of a sample's prompt.

    Raises:
        UserError: the prompt is a list of messages, which needs a chat template.
    """
    if not isinstance(sample.prompt, str):
        raise UserError(
            f"the prompt of sample {sample.index} is a list of messages, and these tokenizers have no chat template; "
            "give its text"
        )
    return tokenizer.encode(sample.prompt)


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255), then the end token and padding."""

    eos_id = 256
    pad_id = 257
    vocab_size = 258

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; bytes that are not UTF-8 read as replacement characters."""
        pad = PAD_TEXT.encode("utf-8")
        pieces = (bytes([token]) if token < self.eos_id else pad for token in tokens if token != self.eos_id)
        return b"".join(pieces).decode("utf-8", errors="replace")


class CharTokenizer:
    """One token per character of a fixed alphabet, then the end token and padding."""

    def __init__(self, characters: str = CHARACTERS) -> None:
        self.characters = characters
        self.eos_id = len(characters)
        self.pad_id = len(characters) + 1
        self.vocab_size = len(characters) + 2
        self._ids = {character: token for token, character in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        """Return one id per character.

        Raises:
            UserError: a character is not in the alphabet.
        """
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise UserError(
                f"characters {unknown} are not among {self.characters!r}, all that this tokenizer knows; "
                f"use --tokenizer-type byte for other text"
            )
        return [self._ids[character] for character in text]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; the end token has none, padding reads `PAD_TEXT`."""
        texts = [*self.characters, "", PAD_TEXT]
        return "".join(texts[token] for token in tokens)


def get_tokenizer(args: Options) -> Tokenizer:
    """Return the tokenizer that `args.tokenizer_type` names.

    `auto` is `arithmetic` for the embedded task, and `byte` where prompts or samples come from a file.

    Raises:
        UserError: the name is none of auto, byte, arithmetic.
    """
    kind = args.tokenizer_type
    if kind == "auto":
        kind = "byte" if args.prompt_data or args.load_debug_rollout_data else "arithmetic"
    if kind not in ("byte", "arithmetic"):
        raise UserError(f"--tokenizer-type must be auto, byte or arithmetic, got {kind!r}")
    return ByteTokenizer() if kind == "byte" else CharTokenizer()
