"""docs/tracking.md names what there is."""

import re
from pathlib import Path

from miles.tools.plot_run.styles import DASHES, MAX_GROUPS
from miles.utils.arguments import build_parser
from miles.utils.options.run import TRACKING
from miles.utils.tracking import tensorboard_tracker, wandb_tracker

PAGE = (Path(__file__).parents[3] / "docs" / "tracking.md").read_text()


def test_the_page_has_every_option_and_tool_and_no_other():
    options = {option for option in build_parser()._option_string_actions if option.startswith("--wandb-")}
    assert set(re.findall(r"^\| `(--[a-z-]+)`", PAGE, flags=re.MULTILINE)) == options | {"--tracking"}
    assert tuple(re.findall(r"^\| `([a-z]+)`", PAGE, flags=re.MULTILINE)) == TRACKING


def test_the_page_names_the_folders_and_the_time():
    assert f"`{tensorboard_tracker.FOLDER}/`" in PAGE and f"`{wandb_tracker.FOLDER}/`" in PAGE
    assert f"`{wandb_tracker.FOLDER}/{wandb_tracker.RUN_ID_NAME}`" in PAGE
    assert wandb_tracker.FINISH_SECONDS == 60.0 and "waits for it for a minute at most" in " ".join(PAGE.split())


def test_the_page_counts_the_lines_that_a_figure_tells_apart():
    text = " ".join(PAGE.split())
    assert f"more than {len(DASHES)} settings" in text and f"more than {MAX_GROUPS} groups" in text
