"""Put each known defect in on purpose and see the suite turn red. Run by hand: `python -m tests.mutants [name ...]`.

Each mutant of `mutations.py` replaces one passage in a temporary copy of the tree. A passage that no longer stands in
the code exactly once is an error, so that a mutant cannot quietly become a copy of the original. The exit status is
the number of mutants that nothing caught.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations import APPENDED, FSDP, FSDP_CHANGED, MEGATRON, MEGATRON_CHANGED, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]


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
    harness = (FSDP, MEGATRON, FSDP_CHANGED, MEGATRON_CHANGED)
    shown = [test if test.startswith(harness) else test.partition("[")[0] for test in failures]
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
            for part in ("miles", "tests", "docs"):
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
