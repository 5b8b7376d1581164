"""Every option of the command line, in titled groups that follow each other as the manual reads."""

from miles.utils.argument_groups.aggregation import LAW_CHOICES, add_loss_aggregation_arguments
from miles.utils.argument_groups.common import PLUGIN_PATH, ManualHelpFormatter, reset_arg
from miles.utils.argument_groups.data import (
    RM_TYPES,
    add_batch_arguments,
    add_data_arguments,
    add_debug_arguments,
    add_rollout_arguments,
)
from miles.utils.argument_groups.loss import add_advantage_arguments, add_loss_arguments
from miles.utils.argument_groups.model import add_model_arguments, add_optimizer_arguments, add_run_arguments
from miles.utils.argument_groups.off_policy import add_off_policy_arguments
from miles.utils.argument_groups.parallel import add_parallel_arguments
from miles.utils.argument_groups.tracking import add_tracking_arguments

ADD_GROUP_FUNCTIONS = (
    add_loss_aggregation_arguments,
    add_loss_arguments,
    add_advantage_arguments,
    add_off_policy_arguments,
    add_rollout_arguments,
    add_data_arguments,
    add_batch_arguments,
    add_model_arguments,
    add_parallel_arguments,
    add_optimizer_arguments,
    add_run_arguments,
    add_tracking_arguments,
    add_debug_arguments,
)
"""In the order of `--help`."""

__all__ = [
    "ADD_GROUP_FUNCTIONS",
    "LAW_CHOICES",
    "PLUGIN_PATH",
    "RM_TYPES",
    "ManualHelpFormatter",
    "reset_arg",
]
