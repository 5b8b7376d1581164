"""The report for a terminal, at most 100 columns wide: the JSON object, with what its numbers mean beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 100
LABEL, CELL = 40, 15
"""Columns of a row's name, and of each number."""
RANK = 8
"""Columns of the place in a list, if the numbers need all others."""

QUARTERS = ("shortest quarter", "second quarter", "third quarter", "longest quarter")


def render(report: dict[str, Any]) -> str:
    """Return the text of `report.describe`'s object."""
    modes = report["modes"]
    blocks = [
        _data(report),
        [_line("", modes), *_token_weights(report)],
        _effective_numbers(report),
        _shares_by_length(report),
        _shares_by_reward(report),
        _heaviest_prompts(report),
        _gradient_weights(report),
        _switches(report),
        _missing(report["unavailable"]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _data(report: dict[str, Any]) -> list[str]:
    data, settings = report["data"], report["settings"]
    dumps, groups = report["dumps"], report["groups"]
    names = Path(dumps[0]["path"]).name + (f" and {len(dumps) - 1} more" if len(dumps) > 1 else "")
    given = settings["loss_aggregation_divisor"] is not None
    statuses = ", ".join(f"{count:,} {status}" for status, count in sorted(data["rows_by_status"].items()))
    lines = [
        ("rollouts", f"{names}, {_plural(data['steps'], 'optimizer step')}"),
        ("samples", f"{data['samples']:,} ({_plural(data['rows'], 'row')}: {statuses})"),
        ("active tokens", f"{data['active_tokens']:,} of {_plural(data['response_tokens'], 'response token')}"),
        ("fully masked samples", f"{data['fully_masked_samples']:,}"),
        ("right, wrong", f"{data['right_samples']:,}, {data['wrong_samples']:,} (right: {settings['right']})"),
        *(_groups(groups, settings) if groups else ()),
        (
            "constant",
            f"L = {_plural(settings['constant_divisor'], 'token')}"
            + ("" if given else ", the longest response (--divisor)"),
        ),
    ]
    if data["has_loss_weights"]:
        lines.append(("loss weights", "in the data; a token then weighs the mean of its sample's"))
    if report["skipped"]:
        lines.append(("left out", _plural(len(report["skipped"]), "sample") + " (--skip-bad)"))
    return [line for name, text in lines for line in _wrapped(f"{name:<26}", text)]


def _groups(groups: dict[str, Any], settings: dict[str, Any]) -> list[tuple[str, str]]:
    source = "" if settings["n_samples_per_prompt"] is not None else ", the most frequent size"
    larger = f", {groups['larger']:,} larger" if groups["larger"] else ""
    return [
        ("prompt groups", f"{groups['groups']:,} of {_plural(groups['size'], 'sample')}{source}"),
        ("  incomplete", f"{groups['incomplete']:,} smaller{larger}"),
        (
            "  with one reward",
            f"{groups['one_reward']:,} ({_plural(groups['samples_of_one_reward'], 'sample')}): no signal where "
            "rewards are normalized in their group",
        ),
    ]


def _token_weights(report: dict[str, Any]) -> list[str]:
    words = {"min": "smallest", "median": "median", "max": "largest"}
    modes = report["modes"].values()
    lines = ["weight of one active token"]
    lines += [
        _line(f"  {word}", (_digits(mode["token_weight"][key]) for mode in modes)) for key, word in words.items()
    ]
    relative = [mode["token_weight_over_token_mean"] for mode in modes]
    if None in relative:
        return lines
    lines.append("weight of one active token, times token_mean's")
    return lines + [_line(f"  {word}", (_times(value[key]) for value in relative)) for key, word in words.items()]


def _effective_numbers(report: dict[str, Any]) -> list[str]:
    modes, groups = report["modes"].values(), report["groups"]
    lines = [
        "effective number, (sum w)^2 / sum w^2",
        _line(
            f"  of {_plural(report['data']['samples'], 'sample')}",
            (f"{mode['effective_samples']:,.1f}" for mode in modes),
        ),
    ]
    if groups:
        numbers = (f"{mode['effective_prompts']:,.1f}" for mode in modes)
        lines.append(_line(f"  of {_plural(groups['groups'], 'prompt')}", numbers))
    return lines


def _shares_by_length(report: dict[str, Any]) -> list[str]:
    lines = ["share of the weight by length in tokens (quarters of the samples of each step)"]
    for place, (name, quarter) in enumerate(zip(QUARTERS, report["quarters"], strict=True)):
        label = f"  {name.removesuffix(' quarter')}, {_span(quarter)}"
        lines.append(_line(label, (_percent(mode["share_by_quarter"][place]) for mode in report["modes"].values())))
    return lines


def _shares_by_reward(report: dict[str, Any]) -> list[str]:
    data = report["data"]
    return ["share of the weight by reward"] + [
        _line(
            f"  {name}, {_percent(data[f'{name}_samples'] / data['samples'])} of samples",
            (_percent(mode["share_by_reward"][name]) for mode in report["modes"].values()),
        )
        for name in ("right", "wrong")
    ]


def _heaviest_prompts(report: dict[str, Any]) -> list[str]:
    if not report["groups"]:
        return []
    number_of = {dump["path"]: f"{number}/" for number, dump in enumerate(report["dumps"], start=1)}
    if len(number_of) == 1:
        number_of = dict.fromkeys(number_of, "")
    name = "number of the dump/group_index" if len(number_of) > 1 else "group_index"
    lists = [mode["heaviest_prompts"] for mode in report["modes"].values()]
    cells = [
        [(f"{number_of[prompt['dump']]}{prompt['group_index']}:", _percent(prompt["share"])) for prompt in prompts]
        for prompts in zip(*lists, strict=True)
    ]
    heading = f"heaviest prompts, {name}: share (equal shares: {_percent(1 / report['groups']['groups'])})"
    return [heading, *_named_numbers(cells, tuple(report["modes"]))]


def _named_numbers(rows: Sequence[Sequence[tuple[str, str]]], columns: Sequence[str]) -> list[str]:
    """Return numbered rows of cells of a name and a number, in columns as wide as the longest cell needs.

    Wider than `CELL`, they have heads of their own; where they would be too wide, names stand above their numbers.
    """
    beside, above = [], []
    for place, row in enumerate(rows, start=1):
        beside.append((f"  {place}.", [" ".join(cell) for cell in row]))
        above += [(f"  {place}.", [name for name, _ in row]), ("", [number for _, number in row])]
    lines = beside if _cell(beside) * len(columns) <= WIDTH - RANK else above
    cell = _cell(lines)
    head = [] if cell == CELL else [_line("", columns, cell=cell)]
    return head + [_line(label, texts, cell=cell) for label, texts in lines]


def _cell(lines: Sequence[tuple[str, Sequence[str]]]) -> int:
    return max(CELL, *(1 + len(text) for _, texts in lines for text in texts))


def _gradient_weights(report: dict[str, Any]) -> list[str]:
    gradient_weights = [mode["gradient_weight"] for mode in report["modes"].values()]
    if None in gradient_weights:
        return []
    if not any(each["magnitude"] for each in gradient_weights):
        return ["gradient weight by length: none, since no answer with weight has an advantage"]
    lines = _wrapped(
        "",
        "gradient weight by length: weight x advantage, in shares of its magnitude over all samples. Above 0 the step "
        "makes such answers more likely, below 0 less.",
    )
    lines += [_line("", report["modes"]), *_gradient_weight_rows(gradient_weights, "share", _signed_percent)]
    difference = (_signed_percent(each["longest_minus_shortest"]["share"]) for each in gradient_weights)
    lines.append(_line("  longest minus shortest", difference))
    lines.append("gradient weight of one active token (1: the mean magnitude over all active tokens)")
    return lines + _gradient_weight_rows(gradient_weights, "per_token", _signed)


def _gradient_weight_rows(
    gradient_weights: Sequence[dict[str, Any]], key: str, shown: Callable[[float | None], str]
) -> list[str]:
    return [
        _line(
            f"  {QUARTERS[place]}, {name}",
            (shown(each["quarters"][place][name][key]) for each in gradient_weights),
        )
        for place in (0, len(QUARTERS) - 1)
        for name in ("right", "wrong", "all")
    ]


def _switches(report: dict[str, Any]) -> list[str]:
    if not report["switches"]:
        return []
    lines = _wrapped(
        "",
        "switch of mode: by what it multiplies the mean weight of an active token, which is what another learning "
        "rate would do to plain gradient steps.",
    )
    columns = ("all", *(name.removesuffix(" quarter") for name in QUARTERS))
    lines.append(_line("", columns, cell=12))
    return lines + [
        _line(
            f"  {switch['from']} -> {switch['to']}",
            (_times(value) for value in (switch["all"], *switch["by_quarter"])),
            cell=12,
        )
        for switch in report["switches"]
    ]


def _missing(unavailable: dict[str, str]) -> list[str]:
    if not unavailable:
        return []
    return ["not available"] + [line for name, why in unavailable.items() for line in _wrapped(f"  {name}: ", why)]


def _line(label: str, cells: Iterable[str], *, cell: int = CELL) -> str:
    cells = tuple(cells)
    width = min(LABEL, WIDTH - cell * len(cells))
    return (f"{label:<{width}}" + "".join(f" {text:>{cell - 1}}" for text in cells)).rstrip()


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def plain(number: float) -> str:
    """Return a number with up to 12 digits, thousands apart."""
    return f"{number:,.12g}"


def _plural(number: float, noun: str) -> str:
    return f"{plain(number)} {noun}{'' if number == 1 else 's'}"


def _span(quarter: dict[str, Any]) -> str:
    return "none" if quarter["shortest"] is None else f"{quarter['shortest']:,} to {quarter['longest']:,}"


def _digits(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2e}" if 0 < value < 1e-2 else f"{value:#.3g}".removesuffix(".")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{_digits(value)}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _signed_percent(value: float | None) -> str:
    return "-" if value is None else f"{round(100 * value, 2) + 0.0:+.2f} %"  # + 0.0: no -0.00


def _signed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{round(value, 3) + 0.0:+.3f}" if abs(value) < 1e5 else f"{value:+.3e}"
