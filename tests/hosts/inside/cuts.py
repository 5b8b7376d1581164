"""Ways a host itself can cut a step: data- and context-parallel ranks, micro-batches of fixed or of dynamic size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oracle import Row, groups

Shape = tuple[str, int, int]
"""Backend, data-parallel size, context-parallel size."""

SHAPES: tuple[Shape, ...] = (
    ("megatron", 1, 1),
    ("megatron", 2, 1),
    ("megatron", 1, 2),
    ("megatron", 2, 2),
    ("fsdp", 1, 1),
    ("fsdp", 2, 1),
)
"""The hosts' FSDP backends have no context parallelism."""


def fits(shape: Shape, rows: Sequence[Row], mode: str, *, num_steps: int = 1) -> bool:
    """Whether the rows of each step can be dealt to the ranks: whole groups under `prompt_mean`."""
    units = len(groups(rows)) if mode == "prompt_mean" else len(rows)
    return units % (num_steps * shape[1]) == 0


def schedules(shape: Shape, rows: Sequence[Row], *, num_steps: int = 1) -> Iterator[tuple[str, ...]]:
    """Flags of the micro-batch schedules that the rows fit: 1, 2 or all rows of a rank; dynamic, tight or loose."""
    _, dp_size, cp_size = shape
    local = len(rows) // (num_steps * dp_size)
    for size in sorted({1, 2, local}):
        if local % size == 0:
            yield ("--micro-batch-size", str(size))
    longest = max(row.total_length for row in rows)
    for room in (longest, 2 * longest):
        yield ("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(-(-room // cp_size)))
