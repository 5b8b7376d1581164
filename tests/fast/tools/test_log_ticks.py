"""Ticks of logarithmic axes against the widths that their labels have when they are drawn."""

import functools
import itertools
import math
import random

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from miles.tools.log_ticks import log_ticks, tick_label


@functools.cache
def _width(text):
    """In heights of the font."""
    return TextPath((0, 0), text, size=100, prop=FontProperties(family="DejaVu Sans")).get_extents().width / 100


def _ranges(seed):
    random.seed(seed)
    for _ in range(100):
        decades = random.choice([random.uniform(0.6, 3), random.uniform(3, 12), random.uniform(12, 300)])
        low = 10 ** random.uniform(-min(decades, 150), 4)
        yield low, low * 10 ** min(decades, 290), random.uniform(20, 60)


@pytest.mark.parametrize("is_across", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_labels_are_apart_in_any_range(seed, is_across):
    for low, high, room in _ranges(seed):
        ticks = log_ticks(low, high, room=room, is_across=is_across).tolist()
        assert len(ticks) >= 2 and low <= ticks[0] and ticks[-1] <= high, (low, high, room)
        places = [room * math.log(tick / low) / math.log(high / low) for tick in ticks]
        sizes = [_width(tick_label(tick)) if is_across else 1.2 for tick in ticks]
        for (place, size), (next_place, next_size) in itertools.pairwise(zip(places, sizes, strict=True)):
            assert next_place - place >= (size + next_size) / 2 + 0.2, (low, high, room)


@pytest.mark.parametrize(
    ("low", "high", "room", "labels"),
    [
        (3, 3_000, 60, ["5", "10", "20", "50", "100", "200", "500", "1,000", "2,000"]),
        (0.9, 20_000, 30, ["1", "10", "100", "1,000", "10,000"]),  # 1,000 and 3,000 would be 3.3 apart, 2.9 wide
        (0.9, 20_000, 42, ["1", "3", "10", "30", "100", "300", "1,000", "3,000", "10,000"]),
        (201, 800, 33, ["300", "500", "700"]),
        (1e-20, 2, 20, ["1e-20", "1e-15", "1e-10", "1e-05", "1"]),
    ],
)
def test_the_finest_series_that_fits(low, high, room, labels):
    assert [tick_label(tick) for tick in log_ticks(low, high, room=room, is_across=True)] == labels
