from argparse import Namespace

import pytest
import torch

from miles.rollout.data_source import DataSource, Prompt
from miles.rollout.sft_rollout import generate_rollout
from miles.rollout.tokenizer import ByteTokenizer
from miles.utils.errors import UserError
from miles.utils.types import Sample


def rollout(*prompts: Prompt, positions: int = 8, **ranks: int) -> list[Sample]:
    source = DataSource(lambda rollout_id, count: list(prompts), len(prompts), 2)
    args = Namespace(max_position_embeddings=positions)
    return generate_rollout(args, 1, source, torch.nn.Identity(), ByteTokenizer(), device=torch.device("cpu"), **ranks)


def test_the_label_and_the_end_token_are_the_response() -> None:
    sample = rollout(Prompt("ab", "é"))[0]
    assert sample.tokens == [97, 98, 0xC3, 0xA9, 256]
    assert sample.response_length == 3
    assert sample.response == "é"
    assert sample.reward == 0.0
    assert sample.rollout_log_probs is None
    assert sample.status is Sample.Status.COMPLETED


def test_ranks_share_the_groups() -> None:
    prompts = [Prompt(text, "1") for text in "abc"]
    # Rollout 1 of 3 prompts x 2 samples begins with group 3.
    assert [s.group_index for s in rollout(*prompts, rank=0, world_size=2)] == [3, 3, 5, 5]
    assert [s.group_index for s in rollout(*prompts, rank=1, world_size=2)] == [4, 4]


def test_a_missing_label_is_an_error() -> None:
    with pytest.raises(UserError, match=r"sample 2 has no label to learn from.*--label-key"):
        rollout(Prompt("ab"))


def test_a_row_longer_than_the_positions_is_an_error() -> None:
    assert len(rollout(Prompt("abcd", "123"))[0].tokens) == 8
    with pytest.raises(UserError, match=r"sample 2: .* make 9 tokens, more than max_position_embeddings=8"):
        rollout(Prompt("abcd", "1234"))
