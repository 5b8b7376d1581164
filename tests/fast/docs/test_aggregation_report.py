"""The page on the report names every key of its JSON file, and no option that does not exist."""

import json
import re
from collections.abc import Iterator
from typing import Any

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools.aggregation_report.__main__ import main
from miles.tools.aggregation_report.options import build_report_parser
from miles.utils.arguments import build_parser
from tests.fast.docs.test_customization import ROOT
from tests.fast.tools.aggregation_report.small_dumps import write_dumps

PAGE = (ROOT / "docs" / "aggregation-report.md").read_text()
KEYS_OF_DATA = set(MODES) | {"completed", "truncated"}


def _keys(report: Any) -> Iterator[str]:
    if isinstance(report, dict):
        yield from report
        for value in report.values():
            yield from _keys(value)
    elif isinstance(report, list):
        for value in report:
            yield from _keys(value)


def test_every_key_of_the_json_file_is_on_the_page(tmp_path):
    assert main([*write_dumps(tmp_path), f"--json={tmp_path}/report.json"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    options = report.pop("settings").keys() - {"constant_divisor", "right", "top"}
    assert options <= {action.dest for action in build_parser()._actions}
    keys = set(_keys(report)) - KEYS_OF_DATA
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert keys - named == set()


def test_every_option_on_the_page_exists():
    known = {*build_parser()._option_string_actions, *build_report_parser()._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert "--skip-bad" in named and named <= known
