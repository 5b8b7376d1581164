"""The defects that `mutants.py` puts in, with the tests that have to see them."""

from dataclasses import dataclass

LAYER = "miles/backends/training_utils"
MEGATRON_UTILS = "miles/backends/megatron_utils"
TESTS = ("tests/fast/backends/training_utils", "tests/fast/ray")
FSDP = "tests/fast/testing/test_fsdp_invariance.py::test_every_mode_and_loss"
MEGATRON = "tests/fast/testing/test_megatron_invariance.py::test_every_mode_and_loss"
FSDP_CHANGED = "tests/fast/testing/test_fsdp_invariance.py::test_changed_masks_and_weights"
MEGATRON_CHANGED = "tests/fast/testing/test_megatron_invariance.py::test_changed_masks_and_weights"
STEP_FACTS = tuple(
    f"tests/fast/backends/training_utils/test_{name}.py" for name in ("step_weights", "described_steps")
)
CHANGED = ("tests/fast/backends/training_utils/test_changed_masks.py", f"{FSDP_CHANGED}[2]")


@dataclass(frozen=True)
class Mutant:
    """One defect: in `file`, `old` becomes `new`; `tests` are those that look for it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = TESTS


MUTANTS = [
    Mutant(
        "train a mode that is not in the table as another one",
        f"{LAYER}/loss_aggregation.py",
        "        return MODES[name]\n",
        '        return MODES[name if name in ("sample_mean", "token_mean", "constant") else "prompt_mean"]\n',
        ("tests/fast/test_fifth_mode.py",),
    ),
    Mutant(
        "take the totals of groups as a caller gives them",
        "miles/ray/rollout/row_groups.py",
        "        if total != of_masks:",
        "        if False and total != of_masks:",
    ),
    Mutant(
        "log kept tokens where totals were prepared alone",
        f"{LAYER}/data.py",
        '"num_kept_tokens": facts.get("num_kept_tokens", counts.num_tokens),',
        '**{key: facts[key] for key in ("num_kept_tokens",) if key in facts},',
    ),
    Mutant(
        "divide by the local count",
        f"{LAYER}/loss.py",
        "loss, global_num_tokens=normalizer, data_parallel_size=state.intra_dp.size",
        "loss,\n"
        "            global_num_tokens=max(int(get_active_token_count(term.responses.batch['loss_masks'])), 1),\n"
        "            data_parallel_size=state.intra_dp.size,",
    ),
    Mutant(
        "drop the normalizer on FSDP",
        f"{LAYER}/loss.py",
        "    return loss * data_parallel_size / global_num_tokens",
        "    return loss * data_parallel_size",
    ),
    Mutant(
        "count masked samples as one token",
        f"{LAYER}/loss_aggregation.py",
        "    return running[ends] - running[ends - lengths]",
        "    return (running[ends] - running[ends - lengths]).clamp_min(1)",
    ),
    Mutant(
        "count the response length",
        f"{LAYER}/loss_aggregation.py",
        "    return running[ends] - running[ends - lengths]",
        "    return lengths",
    ),
    Mutant(
        "stride over groups",
        "miles/ray/rollout/train_data_conversion.py",
        '        columns |= shared_columns("prompt", groups, loss_masks)',
        "        groups = [row // args.n_samples_per_prompt for row in range(len(samples))]\n"
        '        columns |= shared_columns("prompt", groups, loss_masks)',
    ),
    Mutant(
        "use the micro-batch's own group total",
        f"{LAYER}/loss_term.py",
        "as_row_tensor(self.prompt_totals, like=like)",
        "_local_group_totals(self.prompt_totals, like)",
    ),
    Mutant(
        "log with one divisor for all",
        f"{LAYER}/loss.py",
        'units = [metrics.units.get(key, "samples") for key in metrics]',
        'units = [metrics.units.get(key, "tokens") for key in metrics]',
    ),
    Mutant(
        "unmask the numerator",
        f"{LAYER}/loss_aggregation.py",
        "output_size=mask.numel()).mul_(mask)",
        "output_size=mask.numel())",
    ),
    Mutant(
        "num_tokens dropped",
        f"{LAYER}/loss.py",
        "    normalizer = num_tokens if per_token else torch.ones_like(num_tokens)",
        "    normalizer = torch.ones_like(num_tokens)",
        (f"{MEGATRON}[dp1]", f"{MEGATRON}[dp2]"),
    ),
    Mutant(
        "cp factor missing",
        f"{LAYER}/loss.py",
        "            return loss * state.cp.size * (",
        "            return loss * (",
        (f"{MEGATRON}[dp2]", f"{MEGATRON}[cp2]"),
    ),
    Mutant(
        "cp factor doubled",
        f"{LAYER}/loss.py",
        "            return loss * state.cp.size * (",
        "            return loss * state.cp.size * state.cp.size * (",
        (f"{MEGATRON}[dp2]", f"{MEGATRON}[cp2]"),
    ),
    Mutant(
        "full-mask counts on every CP rank (metrics)",
        f"{LAYER}/log_utils.py",
        "        key: value * state.cp.size / normalizer",
        "        key: value / normalizer",
        (f"{MEGATRON}[dp2]", f"{MEGATRON}[cp2]"),
    ),
    Mutant(
        "full-mask counts on every CP rank (sample mean)",
        f"{LAYER}/loss.py",
        "    factor = num_microbatches * state.intra_dp_cp.size if megatron else state.intra_dp.size",
        "    factor = num_microbatches * state.intra_dp.size if megatron else state.intra_dp.size",
        (f"{MEGATRON}[dp2]", f"{MEGATRON}[cp2]"),
    ),
    Mutant(
        "two-tuple loss",
        f"{MEGATRON_UTILS}/actor.py",
        "            return loss_function(self.args, batch, num_microbatches, logits, ",
        "            return (lambda scaled, count, log: (scaled, log))(\n"
        "                *loss_function(self.args, batch, num_microbatches, logits, True)\n"
        "            )\n"
        "            dict(",
        (f"{MEGATRON}[dp1]", f"{MEGATRON}[dp2]"),
    ),
    Mutant(
        "num_microbatches factor missing",
        f"{LAYER}/loss.py",
        "    factor = num_microbatches * state.intra_dp_cp.size if megatron else state.intra_dp.size",
        "    factor = state.intra_dp_cp.size if megatron else state.intra_dp.size",
        (f"{MEGATRON}[dp1]",),
    ),
    Mutant(
        "logged tensors not cloned",
        f"{MEGATRON_UTILS}/actor.py",
        "            return loss_function(self.args, batch, num_microbatches, logits, ",
        "            scaled, count, log = loss_function(self.args, batch, num_microbatches, logits, True)\n"
        "            place = ('normalizers' not in log) + log['keys'].index('loss') if 'loss' in log['keys'] else 0\n"
        "            scaled.data = log['values'][place]  # one storage for what is logged and what Megatron divides\n"
        "            return scaled, count, log\n"
        "            dict(",
        (f"{MEGATRON}[dp1]",),
    ),
    Mutant(
        "last-stage metrics summed over pipeline ranks",
        f"{MEGATRON_UTILS}/actor.py",
        "        return carrier[0]",
        "        return {key: value * pp.size for key, value in carrier[0].items()}",
        (f"{MEGATRON}[dp1]", f"{MEGATRON}[pp2]"),
    ),
    Mutant(
        "prompt scale left out",
        f"{LAYER}/loss_aggregation.py",
        "    return one_for_zero(prompt_mask_sums) * prompts_per_sample",
        "    return one_for_zero(prompt_mask_sums)",
        (f"{FSDP}[2]", f"{MEGATRON}[dp2]"),
    ),
    Mutant(
        "count the micro-batch's kept tokens",
        f"{LAYER}/loss_term.py",
        "            return cls(responses, weights, totals, of_rollouts, tokens, of_prompts, counts)",
        "            args, masks = responses.args, batch.get('kept_masks', batch['loss_masks'])\n"
        "            local = counted_sums(args, counted_masks(args, batch['loss_masks'], masks), weights)\n"
        "            counts = StepCounts(counts.num_samples, counts.num_prompts, local.sum().item() or 1)\n"
        "            return cls(responses, weights, totals, of_rollouts, tokens, of_prompts, counts)",
        CHANGED,
    ),
    Mutant(
        "count the kept tokens of the row, not of its rollout",
        f"{LAYER}/step_totals.py",
        '    rollout_data["rollout_totals"] = rollouts[by_rollout]',
        '    rollout_data["rollout_totals"] = row_totals',
        CHANGED,
    ),
    Mutant(
        "count the kept tokens of this rank",
        f"{LAYER}/step_totals.py",
        "    total = get_parallel_state().intra_dp.all_reduce(torch.cat(parts)).to(row_totals.device)",
        "    total = torch.cat(parts)",
        CHANGED,
    ),
    Mutant(
        "group totals not summed over ranks",
        f"{LAYER}/step_totals.py",
        '        rollout_data["prompt_totals"] = prompts[0][by_prompt]',
        '        rollout_data["prompt_totals"] = parts[-1][by_prompt]',
        CHANGED,
    ),
    Mutant(
        "keep behaves as drop",
        f"{LAYER}/loss_term.py",
        '    return kept_masks if args.rejected_tokens == "drop" else loss_masks',
        "    return kept_masks",
        CHANGED,
    ),
    Mutant(
        "tokens behaves as weights",
        f"{LAYER}/loss_term.py",
        '    if weights is None or args.loss_weight_normalization == "tokens":',
        "    if weights is None:",
        CHANGED,
    ),
    Mutant(
        "totals below 1 count as 1",
        f"{LAYER}/loss_aggregation.py",
        "    return torch.where(totals == 0, 1, totals).to(torch.float64)",
        "    return totals.clamp_min(1).to(torch.float64)",
        CHANGED,
    ),
    Mutant(
        "loss weights count, and weigh nothing",
        f"{LAYER}/loss_term.py",
        "        if self.weights is None:\n            return reducer",
        "        return reducer",
        CHANGED,
    ),
    Mutant(
        "auxiliary terms never match",
        f"{LAYER}/loss_hub/pg_loss_reducer.py",
        'auxiliary=pg if args.aux_loss_aggregation == "match" else kept',
        "auxiliary=kept",
        CHANGED,
    ),
    Mutant(
        "metrics alone change the loss",
        f"{LAYER}/loss_hub/corrections.py",
        "        corrected, masks = pg_loss, ",
        "        masks = ",
        CHANGED,
    ),
    Mutant(
        "geometric mean of this rank's tokens",
        f"{LAYER}/loss_hub/corrections.py",
        "    means = all_reduce_with_cp(sums) / one_for_zero(mask_sums(loss_masks)).to(sums.device)",
        "    means = sums / one_for_zero(mask_sums(local))",
        (f"{MEGATRON_CHANGED}[cp2]",),
    ),
    Mutant(
        "Megatron divides by active tokens, the term by others",
        f"{LAYER}/loss.py",
        "* (counts.num_tokens / normalizer)",
        "* 1",
        (f"{MEGATRON_CHANGED}[dp2]",),
    ),
    Mutant(
        "context lengths local",
        f"{LAYER}/step_totals.py",
        '            "sample_totals": rollouts[step_of_rollout == step],',
        '            "sample_totals": parts[1][step_of_rollout == step],',
        ("tests/fast/testing/test_documented_reducer.py::test_on_fsdp",),
    ),
    Mutant(
        "rollout log over rows",
        f"{LAYER}/log_utils.py",
        '    rollout_counts = torch.as_tensor(rollout_data.get("rollout_counts", [1] * num_rows)).cpu()',
        "    rollout_counts = torch.ones(num_rows)",
        CHANGED,
    ),
    Mutant(
        "weights of this rank's tokens",
        f"{LAYER}/step_weights.py",
        "    return get_parallel_state().cp.all_reduce(torch.cat(parts)).cpu()",
        "    return torch.cat(parts).cpu()",
        STEP_FACTS,
    ),
    Mutant(
        "weights of this rank's rows of a rollout",
        f"{LAYER}/step_weights.py",
        "get_parallel_state().intra_dp.all_reduce(sum_by(rows, by_rollout, num_samples)).cpu()",
        "sum_by(rows, by_rollout, num_samples)",
        (f"{FSDP_CHANGED}[2]",),
    ),
    Mutant(
        "weights of rejected tokens",
        f"{LAYER}/step_weights.py",
        'masks = batch["kept_masks" if "kept_masks" in batch else "loss_masks"]',
        'masks = batch["loss_masks"]',
        STEP_FACTS,
    ),
    Mutant(
        "quarters of the rollout",
        "miles/ray/rollout/dp_split.py",
        "    add_step_columns(columns, steps)",
        '    add_step_columns(columns, [range(len(data["tokens"]))])',
        STEP_FACTS,
    ),
]
APPENDED = {
    "use the micro-batch's own group total": '''

def _local_group_totals(prompt_mask_sums, masks):
    """Rows of one group carry one total, so equal totals stand for one group here."""
    totals = {}
    for key, mask in zip(prompt_mask_sums.tolist(), masks, strict=True):
        totals[key] = totals.get(key, 0) + int(mask.sum())
    return torch.tensor([totals[key] for key in prompt_mask_sums.tolist()], dtype=torch.int64)
''',
}
