"""Event files read back with TensorBoard's own reader; importing this module skips where it is not installed."""

from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra `tensorboard`)")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder: Path) -> EventAccumulator:
    """Return what TensorBoard shows of a folder, every point of it."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of each point of each key, in the order of the files."""
    shown = read(folder)
    return {key: [(point.step, point.value) for point in shown.Scalars(key)] for key in shown.Tags()["scalars"]}


def read_texts(folder: Path) -> list[tuple[int, str]]:
    """Return (step, text) of each set of arguments."""
    points = read(folder).Tensors("arguments/text_summary")
    return [(point.step, point.tensor_proto.string_val[0].decode()) for point in points]
