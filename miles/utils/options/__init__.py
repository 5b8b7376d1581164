"""Every option of the command line, typed: code reads `options.name`, and a type checker finds a misspelled one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.utils.options.data import BatchOptions, DumpOptions, PromptOptions, RolloutOptions
from miles.utils.options.objective import AdvantageOptions, AggregationOptions, CorrectionOptions, LossOptions
from miles.utils.options.run import ModelOptions, OptimizerOptions, ParallelOptions, RunOptions, TrackingOptions

OPTION_GROUPS: dict[str, type] = {
    "loss aggregation": AggregationOptions,
    "loss": LossOptions,
    "advantages": AdvantageOptions,
    "off-policy correction": CorrectionOptions,
    "rollout": RolloutOptions,
    "prompts and rewards": PromptOptions,
    "batch sizes": BatchOptions,
    "model": ModelOptions,
    "parallelism": ParallelOptions,
    "optimizer": OptimizerOptions,
    "run and checkpoints": RunOptions,
    "tracking": TrackingOptions,
    "rollout dumps": DumpOptions,
}
"""Title and options of each group, in the order of `--help`."""


@dataclass
class Options(
    AggregationOptions,
    LossOptions,
    AdvantageOptions,
    CorrectionOptions,
    RolloutOptions,
    PromptOptions,
    BatchOptions,
    ModelOptions,
    ParallelOptions,
    OptimizerOptions,
    RunOptions,
    TrackingOptions,
    DumpOptions,
):
    """The options that the whole package reads, each with its type and its default.

    Types are those after `miles_validate_args`: a value that is derived there, such as `global_batch_size`, is never
    None then.
    """

    @classmethod
    def of(cls, args: Any) -> Options:
        """Return a typed view of a namespace, this package's or a host's.

        The view and the namespace share their attributes, those of custom functions too: setting one sets the other.
        What the namespace lacks has its default in the view.

        Args:
            args: Any object that keeps its attributes in `__dict__`, such as an `argparse.Namespace`.
        """
        if isinstance(args, cls):
            return args
        view = object.__new__(cls)
        view.__dict__ = vars(args)
        return view
