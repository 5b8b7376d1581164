"""Put each known defect in on purpose and see the suite turn red. Run by hand: `python -m tests.mutants [name ...]`.

Each mutant replaces one passage in a temporary copy of the tree. A passage that no longer stands in the code exactly
once is an error, so that a mutant cannot quietly become a copy of the original. The exit status is the number of
mutants that nothing caught.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYER = "miles/backends/training_utils"
MEGATRON_UTILS = "miles/backends/megatron_utils"
TESTS = ("tests/fast/backends/training_utils", "tests/fast/ray")
FSDP = "tests/fast/testing/test_fsdp_invariance.py::test_every_mode_and_loss"
MEGATRON = "tests/fast/testing/test_megatron_invariance.py::test_every_mode_and_loss"


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
        "divide by the local count",
        f"{LAYER}/loss.py",
        "loss, global_num_tokens=counts.num_tokens, data_parallel_size=state.intra_dp.size",
        "loss,\n            global_num_tokens=max(int(get_active_token_count(batch['loss_masks'])), 1),\n"
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
        '        train_data |= _shared_columns("prompt", "prompt_group_indices", groups, loss_masks)',
        "        groups = [row // args.n_samples_per_prompt for row in range(len(samples))]\n"
        '        train_data |= _shared_columns("prompt", "prompt_group_indices", groups, loss_masks)',
    ),
    Mutant(
        "use the micro-batch's own group total",
        f"{LAYER}/loss_hub/pg_loss_reducer.py",
        '            as_row_tensor(batch["prompt_mask_sums"], like=pg_loss_masks),',
        '            _local_group_totals(batch["prompt_mask_sums"], pg_loss_masks),',
    ),
    Mutant(
        "log with one divisor for all",
        f"{LAYER}/loss.py",
        "    normalizers = torch.stack([num_tokens if key in by_token else samples for key in metrics])",
        "    normalizers = torch.stack([num_tokens for key in metrics])",
    ),
    Mutant(
        "unmask the numerator",
        f"{LAYER}/loss_aggregation.py",
        "    weights = mask.to(torch.float64) / _per_token(denominators, loss_masks)",
        "    active = torch.ones_like(active)\n"
        "    weights = torch.ones_like(mask, dtype=torch.float64) / _per_token(denominators, loss_masks)",
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
        "        return loss * state.cp.size",
        "        return loss",
        (f"{MEGATRON}[dp2]", f"{MEGATRON}[cp2]"),
    ),
    Mutant(
        "cp factor doubled",
        f"{LAYER}/loss.py",
        "        return loss * state.cp.size",
        "        return loss * state.cp.size * state.cp.size",
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
        "    return prompt_mask_sums.clamp_min(1).to(torch.float64) * prompts_per_sample",
        "    return prompt_mask_sums.clamp_min(1).to(torch.float64)",
        (f"{FSDP}[2]", f"{MEGATRON}[dp2]"),
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


def mutated(mutant: Mutant, tree: Path) -> str:
    """Return the mutant's file with the defect in it.

    Raises:
        SystemExit: the passage does not stand there exactly once.
    """
    text = (tree / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: expected the passage once in {mutant.file}, found {text.count(mutant.old)}")
    return text.replace(mutant.old, mutant.new) + APPENDED.get(mutant.name, "")


def run_tests(tree: Path, tests: tuple[str, ...]) -> list[str]:
    """Return the names of the tests that fail in the tree.

    Raises:
        SystemExit: the run imported another copy of the package, or ended in something else than passes and failures.
    """
    where = subprocess.run(
        [sys.executable, "-c", "import miles; print(miles.__file__)"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(where).is_relative_to(tree):
        raise SystemExit(f"the tests would import {where} instead of the copy in {tree}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=no-shrink",
    ]
    run = subprocess.run([*command, *tests], cwd=tree, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout[-3000:] + run.stderr[-3000:])
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.MULTILINE)


def report(mutant: Mutant | None, failures: list[str]) -> None:
    """Print what caught the mutant: each failing case of the harness, the number of them of other test functions."""
    name = "unchanged tree" if mutant is None else mutant.name
    print(f"{name}: {len(failures)} failing cases{'' if failures or mutant is None else ', NOT CAUGHT'}")
    shown = [test if test.startswith((FSDP, MEGATRON)) else test.partition("[")[0] for test in failures]
    for test, count in collections.Counter(shown).most_common():
        print(f"    {count:4d}  {test.removeprefix('tests/fast/')}")
    sys.stdout.flush()


def main() -> int:
    """Run the chosen mutants (all of them by default) after checking that the unchanged tree passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run, by any part of their names")
    parser.add_argument("--tests", nargs="*", help="what to run on each, in place of the tests that look for it")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the unchanged tree first")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.names or any(name in m.name for name in options.names)]
    for mutant in chosen:
        mutated(mutant, ROOT)  # says at once which passages have changed
    survivors = 0
    for mutant in ([] if options.skip_unchanged else [None]) + chosen:
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(directory).resolve()
            ignore = shutil.ignore_patterns("__pycache__")
            for part in ("miles", "tests"):
                shutil.copytree(ROOT / part, tree / part, ignore=ignore)
            shutil.copy(ROOT / "pyproject.toml", tree)
            if mutant is not None:
                (tree / mutant.file).write_text(mutated(mutant, tree))
            usual = mutant.tests if mutant else tuple(dict.fromkeys(test for one in chosen for test in one.tests))
            failures = run_tests(tree, tuple(options.tests or usual))
        report(mutant, failures)
        if mutant is None and failures:
            raise SystemExit("the unchanged tree fails; a mutant would prove nothing")
        survivors += mutant is not None and not failures
    return survivors


if __name__ == "__main__":
    raise SystemExit(main())
