"""Packing of rows of unequal length into micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def get_seqlen_balanced_partitions(lengths: Sequence[int], num_partitions: int) -> list[list[int]]:
    """Deal items to partitions of equal size (to within one item) and close token totals.

    Items are taken from the longest down, one round of `num_partitions` at a time, and in each round the longest goes
    to the partition with the fewest tokens (longest-processing-time rule, Graham 1969, under equal cardinality).

    Args:
        lengths: Tokens of each item.
        num_partitions: Number of partitions, >= 1.

    Returns:
        `num_partitions` ascending lists of item positions.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    partitions: list[list[int]] = [[] for _ in range(num_partitions)]
    totals = [0] * num_partitions
    for start in range(0, len(order), num_partitions):
        lightest_first = sorted(range(num_partitions), key=lambda part: (totals[part], part))
        items = order[start : start + num_partitions]
        for part, item in zip(lightest_first[: len(items)], items, strict=True):
            partitions[part].append(item)
            totals[part] += lengths[item]
    return [sorted(partition) for partition in partitions]


def pack_by_token_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack items into few bins of at most `max_tokens`; an item longer than that gets a bin of its own.

    Longest first into the emptiest bin that exists, opening a new one where it does not fit.

    Args:
        lengths: Tokens of each item.
        max_tokens: Token budget of a bin.

    Returns:
        Ascending lists of item positions, ordered by their first item; no bin is empty.
    """
    bins: list[list[int]] = []
    lightest: list[tuple[int, int]] = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        if lightest and lightest[0][0] + lengths[item] <= max_tokens:
            total, index = heapq.heappop(lightest)
        else:
            total, index = 0, len(bins)
            bins.append([])
        bins[index].append(item)
        heapq.heappush(lightest, (total + lengths[item], index))
    return sorted(sorted(bin_) for bin_ in bins)
