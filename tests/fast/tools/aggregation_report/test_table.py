"""The table, taken apart again: every cell against the JSON object, where every number is another one."""

import json
import random
import re
from dataclasses import replace

import pytest

from miles.tools.aggregation_report.__main__ import main
from miles.tools.aggregation_report.table import plain, render
from tests.fast.oracle import Row
from tests.fast.tools.aggregation_report.small_dumps import write_dumps

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
QUARTERS = ("shortest", "second", "third", "longest")
SWITCH_COLUMNS = ("all", *QUARTERS)
HEADINGS = (
    "weight of one",
    "effective number",
    "share of the weight",
    "heaviest prompts",
    "gradient weight",
    "switch of mode",
)


def _step(*rows):
    """Two rows of each group, of (group, response tokens, reward)."""
    return [(Row.of([1] * length, [0] * length, group=group), float(reward)) for group, length, reward in rows]


DUMPS = [
    [_step((7, 3, 1), (7, 12, 0), (3, 9, 1), (3, 2, 0), (9, 6, 0), (9, 4, 1))],
    [_step((7, 1, 0), (7, 7, 1), (5, 3, 1), (5, 8, 0))],
]


@pytest.fixture
def report(tmp_path):
    return _report(tmp_path, DUMPS)


def _report(folder, dumps):
    """The JSON object of dumps, each one step."""
    path = folder / "report.json"
    assert main([*write_dumps(folder, dumps), "--top=3", f"--json={path}"]) == 0
    return json.loads(path.read_text())


def _renumbered(value, draw, key=""):
    """The same object with other numbers: `draw(key)` for a float, a count of its own for an int."""
    if isinstance(value, dict):
        return {name: _renumbered(each, draw, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_renumbered(each, draw, key) for each in value]
    if isinstance(value, float):
        return draw(key)
    return random.randrange(2, 10_000_000) if type(value) is int else value


def _any_float(key):
    if key.startswith("effective"):
        return random.uniform(1, 100_000)
    return random.uniform(0.01, 1) * (random.choice([-1, 1]) if key in ("sum", "share", "per_token") else 1)


def _cells(text):
    """{(heading, row, column): text} of a table, whose columns end where the last names above do."""
    cells, heading, names, ends, row = {}, "", (), [], ""
    for line in filter(None, text.split("\n\nnot available")[0].split("\n\n", 1)[1].splitlines()):
        if {*line.split()} <= {*MODES, *SWITCH_COLUMNS}:
            names, ends = line.split(), [match.end() for match in re.finditer(r"\S+", line)]
        elif line.startswith("  "):
            starts = [2 * ends[0] - ends[1], *ends]
            row = line[: starts[0]].strip() or row
            assert len(line) == ends[-1] and all(line[start] == " " for start in starts[:-1]), line
            for name, start, end in zip(names, starts, ends, strict=False):
                key = (heading, row, name)
                cells[key] = f"{cells.get(key, '')} {line[start:end].strip()}".strip()
        elif line.startswith(HEADINGS):
            heading = re.split(r"[:(]|, (?!times)", line)[0].strip()
    return cells


def _number(text):
    """What a cell says, with shares of 1 for percent; NaN for a dash."""
    if text == "-":
        return float("nan")
    value = float(re.sub("[x%, ]", "", text))
    return value / 100 if text.endswith("%") else value


def _expected_of_mode(mode, report):
    """{(heading, row): number} of a mode's column."""
    data, groups, quarters = report["data"], report["groups"], report["quarters"]
    rows = {}
    for name, key in (("smallest", "min"), ("median", "median"), ("largest", "max")):
        rows["weight of one active token", name] = mode["token_weight"][key]
        rows["weight of one active token, times token_mean's", name] = mode["token_weight_over_token_mean"][key]
    rows["effective number", f"of {data['samples']:,} samples"] = mode["effective_samples"]
    rows["effective number", f"of {groups['groups']:,} prompts"] = mode["effective_prompts"]
    for place, quarter in enumerate(quarters):
        label = f"{QUARTERS[place]}, {quarter['shortest']:,} to {quarter['longest']:,}"
        rows["share of the weight by length in tokens", label] = mode["share_by_quarter"][place]
    for name in ("right", "wrong"):
        label = f"{name}, {100 * data[name + '_samples'] / data['samples']:.2f} % of samples"
        rows["share of the weight by reward", label] = mode["share_by_reward"][name]
    for place, name in ((0, "shortest"), (3, "longest")):
        for side, cell in mode["gradient_weight"]["quarters"][place].items():
            rows["gradient weight by length", f"{name} quarter, {side}"] = cell["share"]
            rows["gradient weight of one active token", f"{name} quarter, {side}"] = cell["per_token"]
    rows["gradient weight by length", "longest minus shortest"] = mode["gradient_weight"]["longest_minus_shortest"][
        "share"
    ]
    return rows


def _expected(report):
    cells = {
        (*row, name): value
        for name, mode in report["modes"].items()
        for row, value in _expected_of_mode(mode, report).items()
    }
    for switch in report["switches"]:
        values = (switch["all"], *switch["by_quarter"])
        for column, value in zip(SWITCH_COLUMNS, values, strict=True):
            cells["switch of mode", f"{switch['from']} -> {switch['to']}", column] = value
    return cells


@pytest.mark.parametrize("seed", range(5))
def test_every_cell_is_the_number_of_the_json_that_it_is_called(report, seed):
    random.seed(seed)
    report = _renumbered(report, _any_float)
    cells = _cells(render(report))
    prompts = {key: cells.pop(key) for key in list(cells) if key[0] == "heaviest prompts"}
    expected = _expected(report)
    assert cells.keys() == expected.keys()
    for key, text in cells.items():
        digits = 4 if "%" in text else 3 if "gradient weight" in key[0] else 1 if "effective" in key[0] else None
        tolerance = {"rel": 5.1e-3, "abs": 0} if digits is None else {"rel": 0, "abs": 0.51 * 10**-digits}
        value = float("nan") if expected[key] is None else expected[key]
        assert _number(text) == pytest.approx(value, nan_ok=True, **tolerance), key
    dumps = [dump["path"] for dump in report["dumps"]]
    for name, mode in report["modes"].items():
        for place, prompt in enumerate(mode["heaviest_prompts"], start=1):
            who = f"{dumps.index(prompt['dump']) + 1}/{prompt['group_index']}"
            assert prompts["heaviest prompts", f"{place}.", name] == f"{who}: {100 * prompt['share']:.2f} %"
    assert len(prompts) == 4 * 3


def test_the_lines_about_the_data(report):
    random.seed(1)
    report = _renumbered(report, _any_float)
    data, groups = report["data"], report["groups"]
    said, name = {}, None
    for line in render(report).split("\n\n")[0].splitlines():
        name = line[:26].strip() or name  # a second line of the same
        said.setdefault(name, []).extend(int(word) for word in re.findall(r"\d+", line[26:].replace(",", "")))
    del said["rollouts"], said["constant"]
    assert said == {
        "samples": [
            data["samples"],
            data["rows"],
            *(data["rows_by_status"][key] for key in ("completed", "truncated")),
        ],
        "active tokens": [data["active_tokens"], data["response_tokens"]],
        "fully masked samples": [data["fully_masked_samples"]],
        "right, wrong": [data["right_samples"], data["wrong_samples"], 1, 0],
        "prompt groups": [groups["groups"], groups["size"]],
        "incomplete": [groups["incomplete"], groups["larger"]],
        "with one reward": [groups["one_reward"], groups["samples_of_one_reward"]],
    }


@pytest.mark.parametrize("factor", [1e-300, 1e-12, 1e12, 1e300])
def test_numbers_of_any_size_stay_in_their_columns(report, factor):
    unbounded = ("min", "median", "max", "all", "by_quarter", "per_token")
    text = render(_renumbered(report, lambda key: _any_float(key) * (factor if key in unbounded else 1)))
    assert len(_cells(text)) == 4 * 30 + 6 * 5


@pytest.mark.parametrize(
    ("offset", "lines_each"),
    [(0, 1), (123_450, 1), (10**9, 1), (10**10, 1), (10**11, 2), (10**14, 2), (9 * 10**18, 2)],
)
def test_columns_of_prompts_are_as_wide_as_their_names_need(tmp_path, offset, lines_each):
    def renamed(step):
        return [(replace(row, group=row.group + offset), reward) for row, reward in step]

    report = _report(tmp_path, [[renamed(step) for step in steps] for steps in DUMPS])
    text = render(report)
    cells = {key: value for key, value in _cells(text).items() if key[0] == "heaviest prompts"}
    for name, mode in report["modes"].items():
        names = [cells["heaviest prompts", f"{place}.", name].split(":")[0].split("/")[1] for place in (1, 2, 3)]
        assert names == [str(prompt["group_index"]) for prompt in mode["heaviest_prompts"]]
    (block,) = (block for block in text.split("\n\n") if block.startswith("heaviest prompts"))
    assert len(block.splitlines()) == 1 + (offset > 10**3) + 3 * lines_each


def test_what_does_not_exist_is_a_dash(tmp_path):
    masked = [(replace(row, mask=(0,) * len(row.mask)), reward) for row, reward in DUMPS[0][0]]
    text = render(_report(tmp_path, [[masked]]))
    cells = _cells(text)
    assert {value for key, value in cells.items() if key[0] == "heaviest prompts"} == {"7: -", "3: -", "9: -"}
    assert {value for key, value in cells.items() if key[0] == "effective number"} == {"0.0"}
    assert {value for key, value in cells.items() if key[0][:4] in ("shar", "weig", "swit")} == {"-"}
    assert "gradient weight by length: none, since no answer with weight has an advantage\n" in text


@pytest.mark.parametrize(
    ("divisor", "words"),
    [
        (1.0, "L = 1 token"),
        (2.0, "L = 2 tokens"),
        (1_048_576.0, "L = 1,048,576 tokens"),
        (123_456.5, "L = 123,456.5 tokens"),
        (0.25, "L = 0.25 tokens"),
        (1e300, "L = 1e+300 tokens"),
    ],
)
def test_the_divisor_is_told_in_full(report, divisor, words):
    report["settings"] |= {"constant_divisor": divisor, "loss_aggregation_divisor": divisor}
    assert f"constant                  {words}\n" in render(report)


def test_one_of_a_thing_is_no_plural(report):
    report["data"] |= {"samples": 1, "rows": 1, "response_tokens": 1, "active_tokens": 1, "steps": 1}
    text = render(report)
    assert "1 optimizer step\n" in text and "1 of 1 response token\n" in text and "1 (1 row: " in text
    assert "  of 1 sample " in text


def test_plain_numbers():
    assert [plain(number) for number in (7, 1571.0, 10**9, 1 / 3)] == ["7", "1,571", "1,000,000,000", "0.333333333333"]
