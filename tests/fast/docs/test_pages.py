"""The pages: links lead somewhere, the index knows each page, options exist, and figures follow from the data."""

import importlib.util
import re
from fractions import Fraction
from pathlib import Path

import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools.aggregation_report.options import build_report_parser
from miles.utils.arguments import build_parser
from tests.fast.docs.test_customization import ROOT
from tests.fast.length_mix import SAMPLES_PER_PROMPT, length_mix

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# The worked example: the values of each answer's tokens, two prompts with two answers each.
PROMPTS = [[[1, 1], [0, 0, 0, 0, 0, 0]], [[1], [1]]]
ANSWERS = [answer for prompt in PROMPTS for answer in prompt]


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and images, without its code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """Return what the page's headings are called in links: lower case, spaces to dashes, no other signs."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(page: str, first_header: str) -> list[list[str]]:
    """Return the cells of the rows of the page's table whose header starts with `first_header`."""
    lines = iter((DOCS / page).read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {first_header} |"):
            break
    next(lines)  # the rule under the header
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(cell: str) -> list[float]:
    """Return the numbers of a cell, without what it has in parentheses."""
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*", re.sub(r"\(.*?\)", "", cell))]


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *PAGES], ids=lambda page: page.name)
def test_links_resolve(page):
    for link in links(page):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to the heading {link}"


def test_the_index_has_each_page_once():
    listed = [link for link in links(DOCS / "README.md") if not link.startswith("..")]
    assert sorted(listed) == [page.name for page in PAGES if page.name != "README.md"]


def test_the_index_counts_the_trainers_of_the_table():
    assert "what ten other trainers call" in (DOCS / "README.md").read_text()
    assert len(table("names.md", "trainer")) == 1 + 10


def test_options_and_commands_of_the_page_on_choosing_exist():
    text = (DOCS / "choosing.md").read_text()
    known = {*build_parser()._option_string_actions, *build_report_parser()._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert "--aux-loss-aggregation" in named and named <= known
    modules = re.findall(r"python -m (\S+)", text)
    assert modules and all(importlib.util.find_spec(module) for module in modules)


def test_the_table_of_names_has_each_mode_and_one_default_for_each_trainer():
    header = "| trainer | option | " + " | ".join(f"`{mode}`" for mode in MODES) + " |"
    assert header in (DOCS / "names.md").read_text()
    rows = table("names.md", "trainer")
    assert all(len(row) == 2 + len(MODES) for row in rows)
    assert [sum("**" in cell for cell in row) for row in rows] == [1] * len(rows)


def mean(values):
    return sum(values) / Fraction(len(values))


def mean_of_token_means(groups):
    """Mean over groups of answers of the mean over the group's tokens: over micro-batches, or prompts."""
    return mean([mean([x for answer in group for x in answer]) for group in groups])


TOKEN_SUM = sum(sum(answer) for answer in ANSWERS)  # 2 + 0 + 1 + 1
TOKENS = sum(len(answer) for answer in ANSWERS)  # 2 + 6 + 1 + 1
TOKEN_MEAN = mean_of_token_means([ANSWERS])
CONSTANT_8 = Fraction(TOKEN_SUM, 8 * len(ANSWERS))
SAMPLE_MEAN_WITH_MASKED = sum(mean(answer) for answer in ANSWERS) / (len(ANSWERS) + 1)


def padded_to(groups):
    """Sum of each group's tokens over its longest answer, summed and divided by all answers: L of each micro-batch."""
    sums = [Fraction(sum(map(sum, group)), max(map(len, group))) for group in groups]
    return sum(sums) / len(ANSWERS)


@pytest.mark.parametrize(
    ("row", "there", "here"),
    [
        (0, [TOKEN_MEAN], [TOKEN_MEAN]),
        (1, [mean_of_token_means(PROMPTS)], [TOKEN_MEAN]),
        (2, [mean_of_token_means([[answer] for answer in ANSWERS])], [TOKEN_MEAN]),
        # Each step divides its own sum, 2 + 0 and 1 + 1, by the tokens of both, 10; alone by 8 and by 2.
        (3, [Fraction(2, TOKENS), Fraction(2, TOKENS)], [Fraction(2, 8), Fraction(2, 2)]),
        (4, [padded_to([ANSWERS])], [CONSTANT_8]),
        (5, [padded_to(PROMPTS)], [CONSTANT_8]),
        (6, [Fraction(TOKEN_SUM, 8)], [CONSTANT_8]),
        (7, [mean([mean(answer) for answer in ANSWERS])], [SAMPLE_MEAN_WITH_MASKED]),
        (8, [Fraction(TOKEN_SUM, TOKENS + 1)], [TOKEN_MEAN]),
        (9, [Fraction(TOKEN_SUM, 2)], [TOKEN_MEAN]),
    ],
)
def test_values_of_other_trainers(row, there, here):
    rows = table("names.md", "what")
    assert len(rows) == 10
    assert numbers(rows[row][2]) == pytest.approx(list(map(float, there)), abs=5e-4)
    assert numbers(rows[row][3]) == pytest.approx(list(map(float, here)), abs=5e-4)


LENGTHS = [response for _, response in length_mix(1024)]


def prompt_sums(values):
    """Sum over the answers of each prompt."""
    return [sum(values[start : start + SAMPLES_PER_PROMPT]) for start in range(0, len(values), SAMPLES_PER_PROMPT)]


def shares_of_answers(mode):
    """Each answer's share of a step's weight, from its length and its prompt's."""
    if mode == "sample_mean":
        return [1 / len(LENGTHS)] * len(LENGTHS)
    if mode == "prompt_mean":
        per_prompt = prompt_sums(LENGTHS)
        return [
            length / per_prompt[index // SAMPLES_PER_PROMPT] / len(per_prompt) for index, length in enumerate(LENGTHS)
        ]
    return [length / sum(LENGTHS) for length in LENGTHS]


def effective_number(shares):
    return 1 / sum(share**2 for share in shares)


@pytest.mark.parametrize("mode", MODES)
def test_figures_of_the_page_on_choosing_follow_from_the_lengths(mode):
    """Within one percent, or two in the last digit: the page's are of active tokens, 96.4 % of these."""
    shares = shares_of_answers(mode)
    quarter = len(LENGTHS) // 4
    by_length = [shares[index] for index in sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__)]
    expected = [100 * sum(by_length[:quarter]), 100 * sum(by_length[-quarter:]), 100 * max(prompt_sums(shares))]
    expected += [effective_number(shares), effective_number(prompt_sums(shares))]
    rows = table("choosing.md", "of these answers")
    shown = [numbers(rows[row][1 + list(MODES).index(mode)])[0] for row in (0, 1, 3, 4, 5)]
    assert shown == pytest.approx(expected, rel=0.01, abs=0.02)


def test_ratios_of_the_page_on_choosing_follow_from_its_shares():
    rows = [[numbers(cell)[0] for cell in row[1:]] for row in table("choosing.md", "of these answers")]
    shortest, longest = rows[0], rows[1]
    scale = 267 / 1571  # mean active tokens over L
    for shares, ratios in ((shortest, rows[6]), (longest, rows[7])):
        expected = [share / shares[2] for share in shares[:3]] + [scale]
        assert ratios == pytest.approx(expected, abs=0.01)
    text = " ".join((DOCS / "choosing.md").read_text().split())
    assert f"times {shortest[2] / shortest[0]:.2f} on the shortest quarter" in text
    assert f"times {longest[2] / longest[0]:.2f} on the longest" in text
    assert f"267 / 1,571 = {scale:.2f}" in text and f"{1 / scale:.1f} times smaller" in text
    assert f"Here it is {rows[8][0] / rows[9][0]:.0f} times less" in text
    assert f"{rows[8][2] / rows[9][2]:.1f} times are left" in text
    short, long = rows[10], rows[11]  # of right answers
    assert f"{short[0]:.3f} against {long[0]:.3f}" in text
    assert [long[mode] / short[mode] for mode in (2, 3)] == pytest.approx([3, 3], abs=0.2)
    # A gradient weight is weight times advantage: over the weights of a token, they are as the advantages.
    assert long[0] / short[0] * rows[6][0] / rows[7][0] == pytest.approx(0.95 / 0.29, rel=0.1)


def test_the_table_of_the_readme_is_the_table_of_modes():
    rows = [row.split(" | ") for row in (ROOT / "README.md").read_text().split("| paper |")[1].splitlines()[2:6]]
    assert [row[0].split("`")[1] for row in rows] == list(MODES)
    for (_, value, paper, _), mode in zip(rows, MODES.values(), strict=True):
        assert value.split(" (L")[0] == mode.summary
        assert re.findall(r"\d{4}\.\d{5}", paper) == re.findall(r"\d{4}\.\d{5}", mode.source)
