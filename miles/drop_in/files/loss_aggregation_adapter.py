"""What a Miles or slime trainer calls to have `--loss-aggregation`; it lies beside `loss_aggregation.py`.

    value = (1 / Z) * sum_i (1 / d_i) * sum_t m_it * x_it        (the modes: see there)

d_i goes into the reducer of the policy-gradient term; Z is what the trainer divides by already: samples (rollouts), or
active tokens under `token_mean`. Without `--loss-aggregation` every function hands back what it was given, so that the
trainer computes what it always did, bit for bit. `token_mean` is `--calculate-per-token-loss` with three faults fixed
that the legacy flag alone keeps: a fully masked row adds no token to the count, FSDP divides by the step's tokens, and
metrics other than those of the policy-gradient term keep the sample mean.

Nothing of the trainer is imported: its functions come in as arguments. `python -m miles.drop_in` wrote the calls.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .loss_aggregation import MODES, LossAggregation, Reducer, RowTotals, StepCounts, make_reducer, mask_sums

Columns = Mapping[str, Any]
MODE_NAMES = ", ".join(MODES)
TOKEN_METRICS = ("loss", "pg_loss", "ess_ratio")
"""Metrics of the policy loss that are token means under `token_mean`; its others are sample means."""


def requested_mode(args: Any) -> LossAggregation | None:
    """Return the mode that `--loss-aggregation` names; None without it (a mock's attribute is no string)."""
    return LossAggregation.of(args) if isinstance(getattr(args, "loss_aggregation", None), str) else None


def _has(args: Any, trait: str) -> bool:
    """Say whether the requested mode, if any, has a trait of the table of modes, such as `needs_prompt_groups`."""
    mode = requested_mode(args)
    return mode is not None and getattr(mode, trait)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def add_arguments(parser: Any) -> None:
    """Add the two options to an argparse parser."""
    modes = "{" + MODE_NAMES.replace(" ", "") + "}"
    text = "how per-token policy loss becomes one scalar a step; default: sample_mean, or the legacy per-token loss"
    parser.add_argument("--loss-aggregation", type=str, default=None, metavar=modes, help=text)
    text = "the fixed length of --loss-aggregation constant, in tokens; positive"
    parser.add_argument("--loss-aggregation-divisor", type=float, default=None, metavar="L", help=text)


def resolve_overrides(args: Any, overrides: Columns) -> Columns:
    """Return a YAML file's values with the two spellings of the token mean in agreement; the file wins."""
    in_file = overrides.get("loss_aggregation") is not None
    mode = overrides["loss_aggregation"] if in_file else getattr(args, "loss_aggregation", None)
    switch, is_token_mean = overrides.get("calculate_per_token_loss"), mode == "token_mean"
    # The switch may promote the sample_mean of the command line.
    can_differ = mode is None or (mode == "sample_mean" and not in_file)
    text = f"conflicting values: the file sets calculate_per_token_loss to {switch}, but loss_aggregation is {mode}"
    _require(can_differ or switch != (not is_token_mean), f"{text}; set loss_aggregation alone, in the file")
    return {"calculate_per_token_loss": is_token_mean, **overrides} if in_file else overrides


def validate_arguments(args: Any) -> None:
    """Check the choice against what depends on it, and set `calculate_per_token_loss` for `token_mean`, in place."""
    mode: Any = getattr(args, "loss_aggregation", None)
    divisor: Any = getattr(args, "loss_aggregation_divisor", None)
    takers = " or ".join(other.name for other in MODES.values() if other.needs_divisor)
    is_taker = isinstance(mode, str) and mode in MODES and MODES[mode].needs_divisor
    text = f"--loss-aggregation-divisor belongs to --loss-aggregation {takers}, not to {mode or 'the default'}"
    _require(is_taker or divisor is None, f"{text}; got {divisor!r}; leave it out, or choose {takers}")
    is_number = isinstance(divisor, numbers.Real) and not isinstance(divisor, bool)
    text = f"--loss-aggregation {mode} needs --loss-aggregation-divisor, a positive finite number of tokens"
    _require(not is_taker or (is_number and 0 < divisor < math.inf), f"{text}; got {divisor!r}")
    if mode is None:
        return
    _require(isinstance(mode, str), f"loss_aggregation must be a string, one of {MODE_NAMES}; got {mode!r}")
    _require(mode in MODES, f"Unknown --loss-aggregation mode {mode!r}; allowed: {MODE_NAMES}")
    per_token = getattr(args, "calculate_per_token_loss", False)
    _require(isinstance(per_token, bool), f"calculate_per_token_loss must be a boolean; got {per_token!r}")
    if mode == "sample_mean" and per_token:
        mode = args.loss_aggregation = "token_mean"
    text = f"--loss-aggregation {mode} is incompatible with --calculate-per-token-loss, which is token_mean"
    _require(mode == "token_mean" or not per_token, f"{text}; leave one of the two out")
    args.calculate_per_token_loss = mode == "token_mean"
    _check_dependents(MODES[mode], args)


def _check_dependents(mode: LossAggregation, args: Any) -> None:
    text = f"{mode.name} needs totals of all samples of a step, which this trainer does not hand to its reducers"
    _require(not mode.needs_step_samples, f"{text}; choose another mode")
    loss_type = getattr(args, "loss_type", "policy_loss")
    takes = " or ".join(other.name for other in MODES.values() if other.is_for_every_loss)
    text = f"--loss-type sft_loss takes --loss-aggregation {takes} only; got {mode.name}"
    _require(loss_type != "sft_loss" or mode.is_for_every_loss, text)
    # The trainer refuses these with per-token loss, but looks before the mode has switched that on.
    given = [name for name in ("multi_lora", "indep_dp") if getattr(args, name, False)]
    _require(not mode.counts_tokens or not given, f"--loss-aggregation {mode.name} is not supported with {given}")
    terms = ["entropy_coef", *(["kl_loss_coef"] if getattr(args, "use_kl_loss", False) else [])]
    given = [f"{name} {getattr(args, name)}" for name in terms if getattr(args, name, 0.0)]
    text = f"--loss-aggregation {mode.name} excludes a nonzero {' and '.join(given)}"
    is_clear = not mode.counts_tokens or loss_type != "policy_loss" or not given
    _require(is_clear, f"{text}: auxiliary policy-loss terms are sample-normalized; set it to 0")
    batch_size: Any = getattr(args, "global_batch_size", None)
    group_size: Any = getattr(args, "n_samples_per_prompt", None)
    text = f"{mode.name} takes whole groups: global_batch_size must be a multiple of n_samples_per_prompt {group_size}"
    is_whole = not mode.needs_prompt_groups or None in (batch_size, group_size) or batch_size % group_size == 0
    _require(is_whole, f"{text}; got {batch_size}")


def prompt_columns(args: Any, samples: Sequence[Any], data: Columns) -> Columns:
    """Return what `prompt_mean` adds to the train data: each row's prompt group, and the group's active tokens."""
    is_empty = _has(args, "counts_tokens") and not any(any(mask) for mask in data["loss_masks"])
    _require(not is_empty, "token_mean needs at least one active token in every optimizer step; this rollout has none")
    if not _has(args, "needs_prompt_groups"):
        return {}
    groups = [sample.group_index for sample in samples]
    sums: dict[Any, int] = {}
    _require(None not in groups, "prompt_mean needs a group_index on every sample; set it to the prompt answered")
    for group, mask in zip(groups, data["loss_masks"], strict=True):
        sums[group] = sums.get(group, 0) + int(sum(mask))
    columns = {"prompt_group_indices": groups, "prompt_mask_sums": [sums[group] for group in groups]}
    names = data.get("rollout_ids", [None] * len(groups))
    names = [("row", row) if name is None else name for row, name in enumerate(names)]
    _groups_by_step(args, columns, names, len(names))
    return columns


def _groups_by_step(args: Any, data: Columns, rollouts: Sequence[Hashable], size: int) -> list[list[list[int]]]:
    """Return the rows of each prompt group of each optimizer step, which is the next `size` rollouts."""
    for name in ("prompt_group_indices", "prompt_mask_sums"):
        text = f"prompt_mean needs one {name} entry per sample ({len(rollouts)}) in the train data"
        _require(len(data.get(name, ())) == len(rollouts), f"{text}; got {len(data.get(name, ()))}")
    step_of = {rollout: index // size for index, rollout in enumerate(dict.fromkeys(rollouts))}
    groups: dict[Hashable, list[int]] = {}
    for row, group in enumerate(data["prompt_group_indices"]):
        groups.setdefault(group, []).append(row)
    steps: list[list[list[int]]] = [[] for _ in range(max(step_of.values()) + 1)]
    for group, rows in groups.items():
        found, n = len({rollouts[row] for row in rows}), args.n_samples_per_prompt
        text = f"prompt_mean needs complete prompt groups of n_samples_per_prompt={n} samples; {group} has {found}"
        _require(found == n, text)
        is_one = len({int(data["prompt_mask_sums"][row]) for row in rows}) == 1
        _require(is_one, f"inconsistent prompt_mask_sums in prompt group {group}; its rows all carry its total")
        step, *others = {step_of[rollouts[row]] for row in rows}
        text = f"the rows of prompt group {group} straddle an optimizer-step boundary; order samples by group"
        _require(not others, text)
        steps[step].append(rows)
    return steps


def _deal(args: Any, steps: Iterable[list[list[int]]], lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Return each rank's rows: equally many groups in each step, with `balance_data` of close token totals."""
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    for step, groups in enumerate(steps):
        text = f"step {step} has {len(groups)} prompt groups, which is not divisible by dp_size {dp_size}"
        _require(len(groups) % dp_size == 0, f"{text}; prompt_mean keeps each on one rank: change global_batch_size")
        if args.balance_data:
            groups = sorted(groups, key=lambda rows: -sum(lengths[row] for row in rows))
        for place, rows in enumerate(groups):
            lap, rank = divmod(place, dp_size)
            ranks[rank if lap % 2 == 0 else dp_size - 1 - rank] += rows
    return ranks


def keep_groups_whole(args: Any, data: Columns, partitions: Sequence[Sequence[int]]) -> Any:
    """Return each rank's rows, of which each step takes equally many in order: `partitions`, but for `prompt_mean`."""
    if not _has(args, "needs_prompt_groups"):
        return partitions
    size = data.get("dynamic_global_batch_size", args.global_batch_size)
    steps = _groups_by_step(args, data, range(len(data["tokens"])), size)
    return _deal(args, steps, data["total_lengths"], len(partitions))


def keep_groups_whole_in_schedule(build_schedule: Callable[..., Any], data: Columns) -> Callable[..., Any]:
    """Return the trainer's `build_dp_schedule`, with each group on one rank under `prompt_mean`.

    Groups are dealt first. Then the trainer schedules each rank as if it were the only one, and a rank with fewer
    micro-batches than another splits some in two.
    """

    def schedule(args: Any, config: Columns, lengths: Sequence[int], **options: Any) -> Any:
        if not _has(args, "needs_prompt_groups"):
            return build_schedule(args, config, lengths, **options)
        names, size, dp_size = options["rollout_indices"], options["global_batch_size"], config["dp_size"]
        steps, alone = _groups_by_step(args, data, names, size), []
        if not getattr(args, "allow_partial_train_step", False):  # the trainer then drops an incomplete last step
            steps = steps[: len(set(names)) // size]
        ranks = _deal(args, steps, lengths, dp_size)
        for rows in ranks:
            own = {"global_batch_size": size // dp_size, "rollout_indices": [names[row] for row in rows]}
            one = {**config, "dp_size": 1}
            alone.append(build_schedule(args, one, [lengths[row] for row in rows], **{**options, **own}))
        counts = [max(step) for step in zip(*(rank[2] for rank in alone), strict=True)]
        batches = [_split(rank[1][0], rank[2], counts) for rank in alone]
        partitions = [[rows[i] for i in rank[0][0]] for rows, rank in zip(ranks, alone, strict=True)]
        return partitions, batches, counts, [count * dp_size for count in alone[0][3]]

    return schedule


def _split(micro_batches: list[list[int]], counts: Sequence[int], targets: Sequence[int]) -> list[list[int]]:
    """Return the micro-batches of each step, split into as many as `targets` says; the one of most rows is halved."""
    result, start = [], 0
    for count, target in zip(counts, targets, strict=True):
        step = micro_batches[start : start + count]
        start += count
        while len(step) < target:
            rows = max(step, key=len)
            index, half = step.index(rows), len(rows) // 2
            _require(half > 0, f"a rank has fewer rows than the {target} micro-batches of another; allow longer ones")
            step[index : index + 1] = [rows[:half], rows[half:]]
        result += step
    return result


def move_prompt_mask_sums(rollout_data: dict[str, Any]) -> None:
    """Make the groups' token counts one tensor beside the loss masks, in place."""
    sums = rollout_data.get("prompt_mask_sums")
    if sums is not None:
        device = rollout_data["loss_masks"][0].device
        rollout_data["prompt_mask_sums"] = torch.tensor(sums, dtype=torch.int64, device=device)


def sums_tokens(args: Any) -> bool:
    """Say whether the trainer's default reducer sums tokens; the policy loss of `token_mean` gets the sample mean."""
    is_policy = getattr(args, "loss_type", "policy_loss") == "policy_loss"
    return args.calculate_per_token_loss and not (is_policy and _has(args, "counts_tokens"))


def get_pg_loss_reducer(args: Any, batch: Columns, loss_masks: Any, default: Reducer, slice_row: Any) -> Reducer:
    """Return the reducer of the policy-gradient term: the mode's, with d_i inside, or the trainer's default."""
    mode = requested_mode(args)
    if mode in (None, MODES["sample_mean"]):
        return default
    columns = [loss_masks, batch["total_lengths"], batch["response_lengths"]]
    if batch.get("max_seq_lens") is not None:
        columns += [[args.qkv_format] * len(loss_masks), batch["max_seq_lens"]]
    masks = [slice_row(*row) for row in zip(*columns, strict=True)]
    sums = batch.get("prompt_mask_sums")
    if sums is not None:
        sums = torch.stack([torch.as_tensor(total) for total in sums]).to(masks[0].device)
    # Groups are complete, so that P / N of the step is that of one group.
    group = StepCounts(
        num_samples=args.n_samples_per_prompt if mode.needs_prompt_groups else 1, num_prompts=1, num_tokens=0
    )
    divisor = getattr(args, "loss_aggregation_divisor", None)
    totals = RowTotals(mask_sums(loss_masks).to(masks[0].device), sums, group, divisor)
    return make_reducer(masks, denominators=mode.denominators(totals))


def count_active_tokens(args: Any, loss_masks: Sequence[Any], legacy_count: Any) -> Any:
    """Return the tokens of a micro-batch: under `token_mean` the active ones, else the trainer's own count."""
    return mask_sums(loss_masks).sum() if _has(args, "counts_tokens") else legacy_count


def count_step_tokens(args: Any, iterator: Any, num_microbatches: Sequence[int], group: Any) -> list[Any]:
    """Return M, the active tokens over the group's ranks, of each step under `token_mean`; else None for each."""
    if not _has(args, "counts_tokens"):
        return [None] * len(num_microbatches)
    sums, size = mask_sums(iterator.rollout_data["loss_masks"]), iterator.micro_batch_size
    batches = iterator.micro_batch_indices or [range(i, i + size) for i in range(0, len(sums), size)]
    counts = torch.stack([sums[list(rows)].sum() for rows in batches[: sum(num_microbatches)]])
    counts = torch.stack([step.sum() for step in counts.split(list(num_microbatches))])
    dist.all_reduce(counts, group=group)
    return counts.tolist()


def divide_by_step_tokens(args: Any, batch: Columns, loss: torch.Tensor, dp_size: int) -> torch.Tensor:
    """Return loss * dp_size / M under `token_mean`, where the backend averages gradients over `dp_size` ranks."""
    if not _has(args, "counts_tokens"):
        return loss
    num_tokens: Any = batch.get("step_num_tokens")
    _require(num_tokens is not None, "token_mean needs batch['step_num_tokens'], the active tokens of the whole step")
    _require(num_tokens > 0, "token_mean needs at least one active token in the optimizer step, got 0")
    return loss * dp_size / num_tokens


def normalize_by_key(args: Any, metrics: Columns, num_tokens: Any, num_samples: int, num_shares: int = 1) -> Columns:
    """Return what replaces the values of a micro-batch's log dictionary; nothing but for `token_mean`.

    Each key gets its normalizer: the micro-batch's tokens, or its samples (one of `num_shares` equal shares of them).
    """
    if not _has(args, "counts_tokens"):
        return {}
    by_token = TOKEN_METRICS if getattr(args, "loss_type", "policy_loss") == "policy_loss" else metrics
    counts = [float(num_tokens if key in by_token else num_samples / num_shares) for key in metrics]
    values = torch.tensor(list(metrics.values()), device=num_tokens.device)
    return {"values": values, "normalizers": torch.tensor(counts, dtype=torch.float64, device=num_tokens.device)}


def aggregate_by_key(logs: Sequence[Columns], cp_size: int, groups: Iterable[Any]) -> dict[str, float] | None:
    """Return the metrics of log dictionaries that carry normalizers, over micro-batches and ranks; None for others."""
    if not any("normalizers" in log for log in logs):
        return None
    keys, pairs = list(logs[0]["keys"]), []
    for log in logs:
        _require("normalizers" in log, "log dictionaries mix the legacy form with the form that carries normalizers")
        _require(list(log["keys"]) == keys, f"log dictionaries differ in keys or their order: {keys}, {log['keys']}")
        for part in ("values", "normalizers"):
            _require(log[part].numel() == len(keys), f"expected {len(keys)} {part}, got {log[part].numel()}")
        pairs.append(torch.stack([log["values"].detach().double(), log["normalizers"].double()]))
    total = torch.stack(pairs).sum(0)
    for group in groups:
        dist.all_reduce(total, group=group)
    values, normalizers = total.tolist()
    for key, normalizer in zip(keys, normalizers, strict=True):
        _require(normalizer > 0, f"the normalizer of metric {key!r} must be positive over the step, got {normalizer}")
    # A context-parallel rank holds a share of each value and counts whole rows.
    return {k: value * cp_size / n for k, value, n in zip(keys, values, normalizers, strict=True)}
