from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.arithmetic import CHARACTERS
from miles.rollout.tokenizer import PAD_TEXT, ByteTokenizer, CharTokenizer, Tokenizer, encode_prompt, get_tokenizer
from miles.utils.errors import UserError
from miles.utils.types import Sample


@given(st.text(alphabet="aé€😀\n\x00 9"))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


@given(st.text(alphabet=CHARACTERS))
def test_characters_round_trip(text: str) -> None:
    tokenizer = CharTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer()], ids=["byte", "arithmetic"])
def test_special_tokens_are_the_last_two_and_padding_is_visible(tokenizer: Tokenizer) -> None:
    assert (tokenizer.eos_id, tokenizer.pad_id) == (tokenizer.vocab_size - 2, tokenizer.vocab_size - 1)
    four, two = tokenizer.encode("42")
    assert tokenizer.decode([four, two, tokenizer.eos_id]) == "42"
    # Were padding silent, a response with padding inside would earn the reward of the answer without it.
    assert tokenizer.decode([four, tokenizer.pad_id, two]) == f"4{PAD_TEXT}2"


def test_bytes_cut_inside_a_character_read_as_replacements() -> None:
    assert ByteTokenizer().decode("é".encode()[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_unknown_characters_are_an_error() -> None:
    with pytest.raises(
        UserError, match=r"\['a', 'é'\] are not among '0123456789\+=' .*--tokenizer-type byte|'a', 'é'"
    ):
        CharTokenizer().encode("1é+a")


@pytest.mark.parametrize(
    ("kind", "prompt_data", "dump", "expected"),
    [
        ("auto", None, None, CharTokenizer),
        ("auto", "prompts.jsonl", None, ByteTokenizer),
        ("auto", None, "dump.pt", ByteTokenizer),
        ("byte", None, None, ByteTokenizer),
        ("arithmetic", "prompts.jsonl", None, CharTokenizer),
    ],
)
def test_choice(kind: str, prompt_data: str | None, dump: str | None, expected: type) -> None:
    args = Namespace(tokenizer_type=kind, prompt_data=prompt_data, load_debug_rollout_data=dump)
    assert type(get_tokenizer(args)) is expected


def test_unknown_tokenizer_is_an_error() -> None:
    with pytest.raises(UserError, match="--tokenizer-type must be auto, byte or arithmetic, got 'word'"):
        get_tokenizer(Namespace(tokenizer_type="word", prompt_data=None, load_debug_rollout_data=None))


def test_a_prompt_of_messages_needs_a_chat_template():
    assert encode_prompt(ByteTokenizer(), Sample(prompt="ab")) == [97, 98]
    with pytest.raises(UserError, match=r"the prompt of sample 3 is a list of messages, .*; give its text"):
        encode_prompt(ByteTokenizer(), Sample(index=3, prompt=[{"role": "user", "content": "ab"}]))
