"""What training needs of the columns of a whole rollout, which a custom conversion may have made."""

from __future__ import annotations

from typing import Any

from miles.backends.training_utils.loss_aggregation import LossAggregation
from miles.ray.rollout.row_checks import (
    check_tokens,
    checked_log_probs,
    checked_loss_mask,
    checked_loss_weights,
    checked_values,
    finite_number,
    short,
    unfit,
)
from miles.ray.rollout.row_groups import ID_COLUMN_OF, check_one_group_each
from miles.utils.errors import UserError
from miles.utils.options import Options

NEEDED_COLUMNS = ("response_lengths", "loss_masks", "rewards")

COUNT_COLUMNS = ("rollout_counts", "rollout_mask_sums", "prompt_counts", "prompt_mask_sums")
"""Optional columns of one whole number for each row."""

ID_COLUMNS = (*ID_COLUMN_OF.values(), "sample_group_indices")
"""Optional columns of one hashable identity for each row."""

OTHER_COLUMNS = (
    *("rollout_log_probs", "loss_weights", "raw_reward", "truncated", "sample_indices", "round_number"),
    "metadata",
)
"""The optional columns that are left."""

TRAINING_COLUMNS = (
    *("kept_masks", "row_totals", "rollout_totals", "rollout_token_totals", "prompt_totals"),
    *("step_counts", "term_counts", "num_kept_tokens", "sample_totals", "step_row_counts"),
    *("length_quarters", "step_prompt_counts"),
)
"""Names that training gives to columns and facts of its own."""

CONVERSION = "the function of --custom-convert-samples-to-train-data-path"


def validate_train_data(args: Options, data: dict[str, Any], *, dp_size: int) -> None:
    """Check what a trainer needs of a whole rollout before it computes anything.

    Args:
        args: Reads `global_batch_size`, the aggregation mode, `prompt_groups` and, for the policy loss, the options
            that need the rollout's log-probs.
        data: Columns, from `convert_samples_to_train_data` or a custom conversion.
        dp_size: Number of data-parallel ranks.

    Raises:
        UserError: a needed column is missing, or a column holds what `check_columns` refuses; a row without a prompt
            token; with complete prompt groups, a number of rollouts that does not divide into steps, or steps that do
            not divide over the ranks.
    """
    args = Options.of(args)
    check_columns(data)
    _check_rollout_log_probs(args, data)
    check_prompt_tokens(data)
    check_batch_sizes(args, data, dp_size=dp_size)


def check_prompt_tokens(data: dict[str, Any]) -> None:
    """Check that every row has a token before its response.

    Raises:
        UserError: naming the first row that has none.
    """
    for row, (tokens, response_length) in enumerate(zip(data["tokens"], data["response_lengths"], strict=True)):
        if len(tokens) <= response_length:
            raise UserError(
                f"sample {row} has {len(tokens)} tokens and a response_length of {response_length}; at least one "
                "prompt token has to come before the response, since a token is predicted from the one before it"
            )


def check_batch_sizes(args: Options, data: dict[str, Any], *, dp_size: int) -> None:
    """Check that, with complete prompt groups, rollouts divide into steps, and steps over the ranks.

    Args:
        args: Reads `global_batch_size`, the aggregation mode and `prompt_groups`.
        data: Columns over all rows.
        dp_size: Number of data-parallel ranks.

    Raises:
        UserError: they do not.
    """
    if args.prompt_groups != "complete":
        return
    num_rollouts = len(set(data.get("rollout_ids", range(len(data["tokens"])))))
    if num_rollouts % args.global_batch_size:
        raise UserError(
            f"the rollout has {num_rollouts} samples, which is not a multiple of global_batch_size "
            f"{args.global_batch_size}; set --global-batch-size to a divisor of {num_rollouts} "
            "(or --rollout-batch-size and --n-samples-per-prompt to what the rollout holds), or pass "
            "--prompt-groups ragged for steps of about that size"
        )
    if not LossAggregation.of(args).needs_prompt_groups and args.global_batch_size % dp_size:
        raise UserError(
            f"global_batch_size {args.global_batch_size} is not divisible by the {dp_size} data-parallel ranks; "
            "change --global-batch-size or the number of processes, or pass --prompt-groups ragged"
        )


def _check_rollout_log_probs(args: Options, data: dict[str, Any]) -> None:
    """Check that an option of the policy loss that needs the rollout's log-probs has them."""
    if args.loss_type != "policy_loss" or "rollout_log_probs" in data:
        return
    needing = ["use_rollout_logprobs"]
    if args.custom_tis_function_path is None:
        needing += ["use_tis", "get_mismatch_metrics"]
    flags = ["--" + name.replace("_", "-") for name in needing if getattr(args, name)]
    if flags:
        raise UserError(
            f"{', '.join(flags)}: the policy loss then needs the rollout's log-probs, and the samples carry none; set "
            "Sample.rollout_log_probs on every sample (in a custom conversion the column rollout_log_probs), or leave "
            "the option out"
        )


def check_columns(data: Any) -> None:
    """Check every column of a rollout's train data.

    Raises:
        UserError: the data is no dict, has no rows, or a column of a name that training uses; a column is missing, or
            no list with an entry for each row; a row's tokens, mask, weights or log-probs, or its reward, cannot be
            trained on; a rollout that spans several prompt groups, or counts of rollouts without their ids.
    """
    if not isinstance(data, dict):
        raise _malformed("must be a dict of columns", type(data).__name__)
    tokens = data.get("tokens")
    if not isinstance(tokens, (list, tuple)) or not tokens:
        got = (
            f"{short(tokens)} ({type(tokens).__name__})"
            if "tokens" in data
            else f"the columns {sorted(map(str, data))}"
        )
        raise _malformed("needs 'tokens', a list of at least one row of token ids", got)
    taken = [key for key in TRAINING_COLUMNS if key in data]
    if taken:
        raise UserError(
            f"train data has columns {', '.join(taken)}, names that training uses itself; rename them in {CONVERSION}"
        )
    num_rows = len(tokens)
    for key in (*NEEDED_COLUMNS, *(key for key in COUNT_COLUMNS + ID_COLUMNS + OTHER_COLUMNS if key in data)):
        _check_column(key, data.get(key, ()), num_rows)
    _check_rows(data)
    if "rollout_ids" not in data and any(count != 1 for count in data.get("rollout_counts", ())):
        raise UserError(
            "train data has rollout_counts other than 1 and no rollout_ids, so nothing says which rows are one "
            f"rollout; return rollout_ids from {CONVERSION} (the counts follow from them)"
        )
    if all(key in data for key in ID_COLUMN_OF.values()):
        check_one_group_each(*(data[key] for key in ID_COLUMN_OF.values()))


def _check_rows(data: dict[str, Any]) -> None:
    for row, (tokens, length, mask) in enumerate(
        zip(data["tokens"], data["response_lengths"], data["loss_masks"], strict=True)
    ):
        name = f"sample {row}"
        check_tokens(name, tokens, length)
        mask = checked_loss_mask(name, mask, length)
        if "rollout_log_probs" in data:
            checked_log_probs(name, data["rollout_log_probs"][row], mask)
        if "loss_weights" in data:
            checked_loss_weights(name, data["loss_weights"][row], length)
        for key in ("rewards", "raw_reward", "truncated", "round_number"):
            if key in data:
                finite_number(data[key][row], f"{name} has {key}")


def _check_column(key: str, column: Any, num_rows: int) -> None:
    if not isinstance(column, (list, tuple)):
        raise _malformed(f"needs {key} as a list with an entry for each of {num_rows} rows", type(column).__name__)
    if len(column) != num_rows:
        raise UserError(f"train data needs {key} for each of {num_rows} rows, got {len(column)}")
    if key in COUNT_COLUMNS:
        checked_values("train data", key, column, "iub", "whole numbers")
    if key in ID_COLUMNS:
        for row, value in enumerate(column):
            _check_identity(f"sample {row} has {key}", value)


def _check_identity(what: str, value: Any) -> None:
    if value is None:
        advice = "rows with equal ids belong together, so give each row an id, or leave the column out where every row"
        raise unfit(what, value, f"{advice} stands alone")
    try:
        hash(value)
    except TypeError as error:
        raise unfit(what, value, "an identity must be hashable, such as an integer") from error


def _malformed(needs: str, got: str) -> UserError:
    return UserError(f"train data {needs}, got {got}; fix what {CONVERSION} returns")
