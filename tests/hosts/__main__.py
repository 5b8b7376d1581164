"""Proves the drop-in on real checkouts: `python -m tests.hosts HOST_CHECKOUT...`, by hand, some minutes per host.

Each checkout (Miles or slime, unmodified; it is only read) is copied twice into a temporary folder and one copy gets
`python -m miles.drop_in --apply`. Then, in processes of the host's own:

1. `inside/record.py` runs random batches without any new flag through both copies: equal bit for bit;
2. `inside/check_*.py` run in the changed copy: arguments, the eighteen cases, random rows at every cut against a
   float64 oracle, the rollout log;
3. with `--own-tests GLOB...`, the host's own tests run in both copies: the same tests with the same results;
4. `--revert` gives the first copy back.

Needs torch, numpy, PyYAML, tqdm, pytest, megatron-core 0.16 and the extra `drop-in`; everything else that a host
imports is stood in for (`inside/stubs.py`) where it is not installed. The host's own tests want pydantic, httpx,
transformers, ray, fastapi, pytest-asyncio and pytest-timeout besides; what sglang or a download would serve fails
alike in both copies.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

INSIDE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parents[2]


def same(left: Any, right: Any) -> bool:
    """Whether two recorded values are equal to the last bit (and in order)."""
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return left.tobytes() == right.tobytes()
    return left == right or (left != left and right != right)


def run_inside(checkout: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the host first on the path, so that its packages are found, not ours."""
    path = os.pathsep.join([str(checkout), str(INSIDE)])
    quick = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env = os.environ | {"PYTHONPATH": path} | quick | variables
    return subprocess.run([sys.executable, *command], cwd=checkout, env=env, capture_output=True, text=True)


def drop_in(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run our tool on a checkout."""
    command = [sys.executable, "-m", "miles.drop_in", str(checkout), *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's content by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def compare_records(before: Path, after: Path, folder: Path) -> tuple[bool, str]:
    """Record both hosts and say how many batches came out alike."""
    recorded = []
    for name, checkout in (("before", before), ("after", after)):
        file = folder / f"{name}.pickle"
        done = run_inside(checkout, str(INSIDE / "record.py"), str(file))
        if done.returncode:
            return False, f"recording {name} failed:\n{done.stderr[-2000:]}"
        recorded.append(pickle.loads(file.read_bytes()))
    old, new = recorded
    failed = [name for name, outcome in old.items() if isinstance(outcome, str)]
    changed = [name for name in old if not same(old[name], new.get(name))]
    text = (
        f"{len(old)} batches without a new flag, {len(changed)} differ {changed[:3]}, {len(failed)} raise {failed[:3]}"
    )
    return not changed and not failed, text


def run_checks(checkout: Path) -> tuple[bool, str]:
    """Run `inside/check_*.py` in the changed host."""
    patterns = ("-o", "python_files=check_*.py", "-o", "python_functions=check_*")
    apart = ("-c", os.devnull, f"--rootdir={INSIDE}", f"--confcutdir={INSIDE}", "-p", "no:cacheprovider")
    quiet = ("-q", "-rsf", "--tb=short", "-p", "no:warnings")
    done = run_inside(checkout, "-m", "pytest", *apart, *patterns, *quiet, str(INSIDE))
    return done.returncode == 0, done.stdout[-6000:].strip() + done.stderr[-1000:]


def own_tests(checkout: Path, patterns: Sequence[str], report: Path) -> dict[str, str]:
    """Outcome of each of the host's tests by name; every match of a pattern has a pytest of its own."""
    plugins = ("-p", "host_plugin", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:warnings")
    options = ("-q", "--continue-on-collection-errors", "--timeout=300", f"--junitxml={report}")
    outcomes = {}
    for path in (path for pattern in patterns for path in sorted(checkout.glob(pattern))):
        run_inside(checkout, "-m", "pytest", *plugins, *options, str(path.relative_to(checkout)), HOSTS_OWN_TESTS="1")
        for test in ElementTree.parse(report).iter("testcase"):
            kind = next((child.tag for child in test if child.tag in ("failure", "error", "skipped")), "passed")
            name = f"{test.get('classname')}::{test.get('name')}".replace(str(checkout), "")
            outcomes[f"{path.name} {name}"] = kind
    return outcomes


def compare_own_tests(before: Path, after: Path, patterns: Sequence[str], folder: Path) -> tuple[bool, str]:
    """Run the host's tests in both and compare them one by one."""
    old, new = (own_tests(checkout, patterns, folder / "report.xml") for checkout in (before, after))
    changed = {name: (old.get(name), new.get(name)) for name in old | new if old.get(name) != new.get(name)}
    before_count, after_count = (dict(sorted(Counter(outcomes.values()).items())) for outcomes in (old, new))
    return (
        not changed,
        f"before {before_count}, after {after_count}; {len(changed)} differ {list(changed.items())[:5]}",
    )


def prove(host: Path, patterns: Sequence[str], folder: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield what was found on one host: title, whether it is right, text."""
    before, after = folder / "before" / host.name, folder / "after" / host.name
    for copy in (before, after):
        shutil.copytree(host, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    for option in ("--apply", "--check"):
        done = drop_in(after, option, *(["--force"] if option == "--apply" else []))
        yield option, done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
        if done.returncode:
            return
    yield "default mode", *compare_records(before, after, folder)
    yield "checks", *run_checks(after)
    if patterns:
        yield "own tests", *compare_own_tests(before, after, patterns, folder)
    drop_in(after, "--revert", "--force")
    yield "--revert", tree(before) == tree(after), "every file as it was"


def main() -> int:
    """Prove every host of the command line; exit status 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__.splitlines()[0])
    parser.add_argument("hosts", nargs="+", type=Path, metavar="HOST_CHECKOUT")
    help_text = "globs of the host's own tests, each match run by itself: 'tests/fast/backends' 'tests/test_cp*.py'"
    parser.add_argument("--own-tests", nargs="+", default=[], metavar="GLOB", help=help_text)
    options = parser.parse_args()
    is_right = True
    for host in options.hosts:
        with tempfile.TemporaryDirectory() as folder:
            for title, is_ok, text in prove(host.resolve(), options.own_tests, Path(folder)):
                print(f"[{host.name}] {title}: {'ok' if is_ok else 'WRONG'}\n{text.strip()}\n", flush=True)
                is_right &= is_ok
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
