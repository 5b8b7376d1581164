"""What README, CONTRIBUTING, CI and the docs site say to run is the same, and exists."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.fast.docs.test_customization import ROOT


def shell_blocks(page: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def ci_commands() -> list[str]:
    return [line for line in (ROOT / ".ci/run").read_text().splitlines() if line and not line.startswith("#")]


def test_the_first_two_blocks_of_the_readme_are_one_command_each():
    train, test = (block.strip() for block in shell_blocks("README.md")[:2])
    install = 'pip install -c constraints.txt -e ".[dev]"'
    assert train == f"{install} && python train.py --loss-aggregation prompt_mean"
    assert test == f"{install} && pytest tests/fast"


def test_ci_runs_the_tests_as_the_readme_does():
    assert ci_commands()[-1] == shell_blocks("README.md")[1].strip().split(" && ")[-1]


def test_ci_installs_what_the_contributor_installs():
    contributor = shell_blocks("CONTRIBUTING.md")[0].splitlines()[0]
    [ci] = [line for line in ci_commands() if line.startswith("pip install")]
    assert [word for word in shlex.split(ci) if word not in ("--quiet", "--disable-pip-version-check")] == shlex.split(
        contributor
    )


def test_the_public_workflow_runs_the_same_script():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["run"]["steps"] if "run" in step]
    assert commands == [".ci/run"]


def test_modules_that_the_pages_run_exist():
    for page in ("README.md", "CONTRIBUTING.md"):
        named = re.findall(r"python -m ([\w.]+)", (ROOT / page).read_text())
        assert named
        for module in named:
            assert importlib.util.find_spec(module), f"{page}: {module}"


def test_the_docs_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in ("index.html", "start.html", "contributing.html", "changelog.html", "api.html"):
        assert (tmp_path / page).exists(), page
    text = (tmp_path / "start.html").read_text()
    assert 'href="contributing.html"' in text and 'href="loss-aggregation.html"' in text
