"""The two files that land in a host, in a package of another name, and a namespace for them."""

from __future__ import annotations

import importlib
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

MILES = Path(__file__).parents[4] / "miles"
FILES = ("backends/training_utils/loss_aggregation.py", "drop_in/files/loss_aggregation_adapter.py")


@contextmanager
def imported_adapter(root: Path) -> Iterator[ModuleType]:
    """Import the adapter from a package in the folder `root`."""
    (root / "some_trainer").mkdir()
    for file in FILES:
        shutil.copy(MILES / file, root / "some_trainer")
    sys.path.insert(0, str(root))
    try:
        yield importlib.import_module("some_trainer.loss_aggregation_adapter")
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == "some_trainer"]:
            del sys.modules[name]


def arguments(**given: Any) -> Namespace:
    """Return a host's namespace for which every rule holds, under `prompt_mean` unless something else is given."""
    sizes = {"global_batch_size": 4, "n_samples_per_prompt": 2, "balance_data": False}
    return Namespace(**{"loss_aggregation": "prompt_mean", "calculate_per_token_loss": False, **sizes, **given})
