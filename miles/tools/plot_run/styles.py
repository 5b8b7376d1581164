"""Which colour and dashes a group of runs has."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from miles.tools.figure_style import STYLES, Style, mode_style, nth_style
from miles.tools.plot_run.runs import RunGroup
from miles.utils.errors import UserError

DASHES = tuple(style.dashes for style in STYLES)
MAX_GROUPS = len(STYLES) * len(DASHES)
"""As many lines can be told apart by colour and dashes."""

logger = logging.getLogger(__name__)


def group_styles(groups: Sequence[RunGroup]) -> list[Style]:
    """Return a style for each group; no two have both colour and dashes of one another.

    Where modes differ, the colour stands for the mode. The dashes are the mode's as well where each mode has one
    group, and else stand for the setting, the same in every mode. Groups of one mode, or of more settings than there
    are dashes, have one style after another, which stands for nothing (the latter with a warning).

    Raises:
        UserError: more than `MAX_GROUPS` groups.
    """
    if len(groups) > MAX_GROUPS:
        raise UserError(
            f"a figure tells {MAX_GROUPS} settings apart by colour and dashes, and these runs have {len(groups)}; "
            "name fewer runs at once"
        )
    by_mode = [mode_style(group.mode) for group in groups]
    num_colours = len({style.colour for style in by_mode})
    if num_colours == len(groups):
        return by_mode
    if num_colours > 1:
        settings = list(dict.fromkeys(group.setting for group in groups))
        places = (settings.index(group.setting) % len(DASHES) for group in groups)
        styles = [replace(style, dashes=DASHES[place]) for style, place in zip(by_mode, places, strict=True)]
        if len(settings) <= len(DASHES) and len(set(styles)) == len(groups):
            return styles
        logger.warning("too many settings for %d kinds of dashes: colours stand for no modes here", len(DASHES))
    return [nth_style(place) for place in range(len(groups))]
