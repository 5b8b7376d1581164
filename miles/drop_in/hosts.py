"""The trainers that are known: how each is recognised, what lands in it, and where its seams are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miles.drop_in.checkout import Checkout
from miles.drop_in.seam import Seam
from miles.drop_in.seams import loss, options, samples, training
from miles.utils.errors import UserError

MODULE, ADAPTER = "loss_aggregation.py", "loss_aggregation_adapter.py"


@dataclass(frozen=True)
class Host:
    """A trainer in one of its layouts.

    Attributes:
        name: "miles" or "slime".
        layout: what tells this layout from the others of the trainer.
        package: the top package in the checkout.
        new_files: path in the checkout to the name of the file that lands there: a resource of `miles.drop_in.files`,
            or `loss_aggregation.py` of this package.
        seams: the edits, in order.
    """

    name: str
    layout: str
    package: str
    new_files: Mapping[str, str]
    seams: tuple[Seam, ...]


def detect_host(checkout: Checkout) -> Host:
    """Return the host that a checkout holds.

    Raises:
        UserError: it holds none that is known; the message says which files were looked for.
    """
    if checkout.exists(_OURS):
        raise UserError(f"{checkout.root} is this project, which has the modes; name the checkout of another trainer")
    for marks, build in _HOSTS.values():
        if all(checkout.exists(mark) for mark in marks):
            return build(checkout)
    looked_for = "; ".join(f"{host}: {', '.join(marks)}" for host, (marks, _) in _HOSTS.items())
    raise UserError(
        f"{checkout.root} is no checkout of a trainer that is known. Looked for {looked_for}. Name the folder that "
        "holds the package, or add the trainer (docs/drop-in.md)"
    )


def _miles(checkout: Checkout) -> Host:
    """Return miles: a schedule made on the training side or on both, one backend for each folder that is there."""
    utils, training_utils = "miles/utils", "miles/backends/training_utils"
    home = "miles.backends.training_utils"
    conversion = "miles/ray/rollout/train_data_conversion.py"
    is_scheduled = checkout.exists(f"{utils}/dp_schedule.py")
    fsdp = [path for path in _MILES_FSDP if checkout.exists(path)]
    rows = ("num_samples",)
    rollouts = (
        "num_samples if num_rollouts is None else num_rollouts",
        "1 if num_rollouts is None else num_microbatches * parallel_state.intra_dp.size",
    )
    scheduled = (samples.StoreSchema, samples.WholeGroupsInSchedule) if is_scheduled else ()
    return Host(
        name="miles",
        layout="schedule on the rollout side" if is_scheduled else "schedule on the training side",
        package="miles",
        new_files={f"{training_utils}/{name}": name for name in (MODULE, ADAPTER)},
        seams=(
            *(seam(f"{utils}/arguments.py", home) for seam in _OPTIONS),
            *(seam(conversion, home) for seam in (samples.PromptColumns, samples.ShardColumns, samples.WholeGroups)),
            *(seam(conversion, home) for seam in scheduled),
            training.TensorMove(f"{training_utils}/data.py", home),
            training.MegatronColumns("miles/backends/megatron_utils/model.py", home),
            *(seam(path, home) for path in fsdp for seam in _FSDP),
            *(seam(f"{training_utils}/loss.py", home) for seam in (loss.DefaultReducer, loss.ActiveTokens)),
            loss.TokenDivisor(f"{training_utils}/loss.py", home),
            loss.KeyNormalizers(f"{training_utils}/loss.py", home, rollouts if is_scheduled else rows),
            loss.CorrectedReducer(f"{training_utils}/loss_hub/losses.py", home),
            loss.PgLossReducer(f"{training_utils}/loss_hub/losses.py", home),
            loss.MetricAggregation(f"{training_utils}/log_utils.py", home),
            training.RolloutLog(f"{training_utils}/log_utils.py", home),
        ),
    )


def _slime(checkout: Checkout) -> Host:
    """Return slime: a schedule made on the rollout side, and Megatron alone."""
    megatron, home = "slime/backends/megatron_utils", "slime.utils"
    shares = (
        "step_global_batch_size",
        "num_microbatches * mpu.get_data_parallel_world_size(with_context_parallel=False)",
    )
    conversion = (samples.PromptColumns, samples.ShardColumns, samples.WholeGroupsInSchedule)
    reducers = (loss.DefaultReducer, loss.ActiveTokens, loss.CorrectedReducer, loss.PgLossReducer)
    return Host(
        name="slime",
        layout="schedule on the rollout side",
        package="slime",
        # Not beside the losses, since that package needs Megatron and options and rollouts do not.
        new_files={f"slime/utils/{name}": name for name in (MODULE, ADAPTER)},
        seams=(
            *(seam("slime/utils/arguments.py", home) for seam in _OPTIONS),
            *(seam("slime/ray/rollout.py", home) for seam in conversion),
            training.TensorMove(f"{megatron}/actor.py", home),
            training.MegatronColumns(f"{megatron}/model.py", home),
            *(seam(f"{megatron}/loss.py", home) for seam in reducers),
            loss.KeyNormalizers(f"{megatron}/loss.py", home, shares),
            loss.MetricAggregation("slime/observability/train_metric_utils.py", home),
            training.RolloutLog("slime/observability/train_metric_utils.py", home),
        ),
    )


_OURS = "miles/drop_in/hosts.py"
_OPTIONS = (options.Options, options.YamlSpellings, options.Validation)
_FSDP = (training.FSDPColumns, training.FSDPStepTokens, training.FSDPBatchTokens)
_MILES_FSDP = ("miles/backends/fsdp_utils/actor.py", "miles/backends/experimental/fsdp_utils/actor.py")
_HOSTS = {
    "miles": (("miles/utils/arguments.py", "miles/ray/rollout/train_data_conversion.py"), _miles),
    "slime": (("slime/utils/arguments.py", "slime/ray/rollout.py"), _slime),
}
