"""Exact loss aggregation for RL post-training trainers.

The names of `__all__` are imported from their home modules at first use: `import miles` is quick and needs no torch.
docs/api.md says what each one is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
    from miles.backends.training_utils.loss_aggregation import (
        MODES,
        LossAggregation,
        Reducer,
        RowTotals,
        StepCounts,
        make_reducer,
        mask_sums,
        prompt_denominators,
    )
    from miles.backends.training_utils.loss_hub.custom_reducer import ReducerContext
    from miles.backends.training_utils.loss_hub.pg_loss_reducer import get_pg_loss_reducer
    from miles.integrations.step_aggregation import StepAggregation
    from miles.ray.rollout.dp_split import split_train_data_by_dp
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.types import RolloutBatch, Sample

    __version__: str

__all__ = [
    "MODES",
    "LossAggregation",
    "Reducer",
    "ReducerContext",
    "RolloutBatch",
    "RowTotals",
    "Sample",
    "StepAggregation",
    "StepCounts",
    "convert_samples_to_train_data",
    "get_pg_loss_reducer",
    "get_sum_of_sample_mean",
    "make_reducer",
    "mask_sums",
    "prompt_denominators",
    "split_train_data_by_dp",
]

_AGGREGATION = "miles.backends.training_utils.loss_aggregation"
_HOMES = {
    "MODES": _AGGREGATION,
    "LossAggregation": _AGGREGATION,
    "Reducer": _AGGREGATION,
    "ReducerContext": "miles.backends.training_utils.loss_hub.custom_reducer",
    "RolloutBatch": "miles.utils.types",
    "RowTotals": _AGGREGATION,
    "Sample": "miles.utils.types",
    "StepAggregation": "miles.integrations.step_aggregation",
    "StepCounts": _AGGREGATION,
    "convert_samples_to_train_data": "miles.ray.rollout.train_data_conversion",
    "get_pg_loss_reducer": "miles.backends.training_utils.loss_hub.pg_loss_reducer",
    "get_sum_of_sample_mean": "miles.backends.training_utils.cp_utils",
    "make_reducer": _AGGREGATION,
    "mask_sums": _AGGREGATION,
    "prompt_denominators": _AGGREGATION,
    "split_train_data_by_dp": "miles.ray.rollout.dp_split",
}


def _version() -> str:
    """Return the installed version; "0+unknown" for a copy that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("miles")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    """Import a public name at first use (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names too, imported or not."""
    return sorted({*globals(), *__all__, "__version__"})
