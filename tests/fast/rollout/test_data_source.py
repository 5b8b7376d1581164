import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from miles.rollout.arithmetic import draw_problems
from miles.rollout.data_source import build_data_source, read_prompts
from miles.rollout.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from miles.utils.errors import UserError


def make_args(**changes: Any) -> Namespace:
    defaults = {
        "prompt_data": None,
        "input_key": "input",
        "label_key": "label",
        "rollout_shuffle": False,
        "rollout_seed": 1,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 3,
        "rollout_max_response_len": 4,
        "max_position_embeddings": 16,
    }
    return Namespace(**{**defaults, **changes})


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return str(path)


def drawn(args: Namespace, rollout_id: int, tokenizer: Tokenizer | None = None) -> list[str]:
    groups = build_data_source(args, tokenizer or ByteTokenizer()).get_samples(rollout_id)
    return [group[0].prompt for group in groups]


def test_the_embedded_task_is_the_default() -> None:
    groups = build_data_source(make_args(), CharTokenizer()).get_samples(5)
    assert [(group[0].prompt, group[0].label) for group in groups] == draw_problems(1, 5, 2)


def test_indices_count_through_the_run_and_a_group_shares_its_prompt() -> None:
    groups = build_data_source(make_args(), CharTokenizer()).get_samples(5)
    # Rollout 5 of 2 prompts x 3 samples begins with group 10 and sample 30.
    assert [[sample.group_index for sample in group] for group in groups] == [[10] * 3, [11] * 3]
    assert [sample.index for group in groups for sample in group] == list(range(30, 36))
    assert all(len({(sample.prompt, sample.label) for sample in group}) == 1 for group in groups)


def test_a_file_is_read_with_labels_metadata_and_blank_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"q": "é?", "a": 18, "source": ["x"]}, "", {"q": "b", "a": "1"}, "  ", "")
    prompts = read_prompts(path, "q", "a")
    assert {line: (p.text, p.label, p.metadata) for line, p in prompts.items()} == {
        1: ("é?", "18", {"source": ["x"]}),
        3: ("b", "1", {}),
    }
    assert [prompt.label for prompt in read_prompts(path, "q", None).values()] == [None, None]


def test_each_sample_has_its_own_metadata(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"input": "a", "label": "1", "source": "x"})
    (first, second, _), _ = build_data_source(make_args(prompt_data=path), ByteTokenizer()).get_samples(0)
    first.metadata["seen"] = True
    assert second.metadata == {"source": "x"}


def test_rollouts_walk_through_the_file_and_begin_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({"input": name, "label": "1"} for name in "abcde"))
    args = make_args(prompt_data=path)
    assert [drawn(args, rollout) for rollout in range(4)] == [["a", "b"], ["c", "d"], ["e", "a"], ["b", "c"]]
    assert drawn(make_args(prompt_data=path, rollout_batch_size=7), 0) == list("abcdeab")


def test_each_epoch_is_shuffled_anew_by_the_seed(tmp_path: Path) -> None:
    names = [chr(ord("a") + place) for place in range(20)]
    path = write_lines(tmp_path / "a.jsonl", *({"input": name, "label": "1"} for name in names))
    args = make_args(prompt_data=path, rollout_shuffle=True, rollout_batch_size=5)
    epochs = [[name for rollout in range(first, first + 4) for name in drawn(args, rollout)] for first in (0, 4)]
    assert all(sorted(epoch) == names for epoch in epochs)
    assert names != epochs[0] != epochs[1] != names
    assert drawn(args, 6) == epochs[1][10:15]  # a fresh source, as after a resume
    other_seed = make_args(prompt_data=path, rollout_shuffle=True, rollout_batch_size=20, rollout_seed=2)
    assert drawn(other_seed, 0) != epochs[0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"input": "a", "label": 1}', "{oops"], r"line 2: not JSON \(.*\); expected one object a line"),
        (["", "[1]"], "line 2: expected a JSON object, got list"),
        ([{"text": "a", "label": "1"}], r"line 1: no key 'input'; it has \['label', 'text'\].*--input-key"),
        ([{"input": "a", "answer": 1}], r"line 1: no key 'label'; it has \['answer', 'input'\].*--label-key"),
        ([{"input": 3, "label": "1"}], "line 1: 'input' must be a text of at least one character, got 3"),
        ([{"input": "", "label": "1"}], "line 1: 'input' must be a text of at least one character, got ''"),
        ([{"input": "a", "label": None}], "line 1: 'label' must be a text or a number, got None"),
        ([{"input": "a", "label": True}], "line 1: 'label' must be a text or a number, got True"),
        (['{"input": "a\\ud800", "label": 1}'], r"line 1: 'input' has '\\ud800' at character 1, half of a surrogate"),
        (["", '{"input": "a", "label": "\\udfff"}'], r"line 2: 'label' has '\\udfff' at character 0, half of a surr"),
        (["", 100_000 * "["], r"line 2: not JSON \(maximum recursion depth"),
        ([], "is empty"),
        (["", "  "], "is empty"),
        (
            [{"input": "a", "label": "1"}, {"input": "a" * 13, "label": "1"}],
            "line 2: the prompt has 13 tokens, but max_position_embeddings=16 less rollout_max_response_len=4 "
            "allows at most 12; .*--max-position-embeddings to 17",
        ),
    ],
)
def test_bad_files(tmp_path: Path, lines: list[Any], message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", *lines)
    with pytest.raises(UserError, match=rf"a\.jsonl.*{message}"):
        build_data_source(make_args(prompt_data=path), ByteTokenizer())


def test_a_prompt_that_just_fits(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"input": "a" * 12, "label": "1"})
    assert drawn(make_args(prompt_data=path), 0) == ["a" * 12] * 2


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input": "a", "label": "1"}\n{"input": "\xff"}\n')
    with pytest.raises(UserError, match="line 2: not JSON"):
        read_prompts(str(path), "input", "label")


def test_both_halves_of_a_surrogate_pair_are_a_character(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", '{"input": "\\ud83d\\ude00", "label": "\\ud83d\\ude00"}')
    assert read_prompts(path, "input", "label")[1].text == "\N{GRINNING FACE}"


def test_missing_file() -> None:
    with pytest.raises(UserError, match=r"cannot read --prompt-data nowhere\.jsonl: No such file"):
        build_data_source(make_args(prompt_data="nowhere.jsonl"), ByteTokenizer())


def test_characters_that_the_tokenizer_lacks_are_found_at_set_up(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"input": "1+x", "label": "1"})
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: characters \['x'\] are not among"):
        build_data_source(make_args(prompt_data=path), CharTokenizer())


def test_positions_too_few_for_the_embedded_task() -> None:
    build_data_source(make_args(max_position_embeddings=13), CharTokenizer())
    with pytest.raises(UserError, match="the embedded task: the prompt has 9 tokens"):
        build_data_source(make_args(max_position_embeddings=12), CharTokenizer())
