"""Options of tracking: names, what they need, and what the manual's import may not load."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from miles.utils import tracking_args
from miles.utils.arguments import miles_validate_args, parse_args
from miles.utils.errors import UserError

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    """Every tool is installed, in the oldest version that is admitted."""
    versions = dict(tracking_args.MINIMUM_VERSIONS)

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(tracking_args.metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    "given, tracking",
    [
        ([], ["jsonl"]),
        (["jsonl"], ["jsonl"]),
        (["wandb"], ["jsonl", "wandb"]),
        (["wandb", "tensorboard", "wandb", "jsonl"], ["jsonl", "tensorboard", "wandb"]),
    ],
)
def test_jsonl_is_always_on_and_order_does_not_matter(given, tracking):
    args = parse_args(["--tracking", *given] if given else [])
    assert args.tracking == tracking
    miles_validate_args(args)
    assert args.tracking == tracking


@pytest.mark.parametrize(
    "text, tracking",
    [
        ("tracking: wandb", ["jsonl", "wandb"]),
        ("tracking: [wandb, tensorboard]", ["jsonl", "tensorboard", "wandb"]),
        ("tracking: []", ["jsonl"]),
        ("tracking: null", ["jsonl"]),
    ],
)
def test_the_file_overrides_the_command_line(parse, text, tracking):
    assert parse(text, "--tracking", "tensorboard").tracking == tracking


@pytest.mark.parametrize(
    "text, message",
    [
        ("tracking: mlflow", r"^--tracking takes one or several of jsonl, tensorboard, wandb; got 'mlflow'$"),
        ("tracking: [wandb, csv]", r"^--tracking takes one or several of .*; got \['wandb', 'csv'\]$"),
        ("tracking: 1", r"tracking \(--tracking\) must be a string, or a list of such; got 1 \(int\)$"),
        ("tracking: [1]", r"tracking \(--tracking\) must be a string, or a list of such; got 1 \(int\) in the list$"),
        ("tracking: [wandb, true]", r"a string, or a list of such; got True \(bool\) in the list$"),
        ("tracking: [[wandb]]", r"a string, or a list of such; got \['wandb'\] \(list\) in the list$"),
        ("tracking: {wandb: 1}", r"a string, or a list of such; got \{'wandb': 1\} \(dict\)$"),
        ("wandb_mode: shared", r"wandb_mode \(--wandb-mode\) must be one of online, offline, disabled; got 'shared'"),
    ],
)
def test_what_the_file_may_not_hold(parse, text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_the_command_line_refuses_in_the_same_words():
    with pytest.raises(UserError, match=r"^--tracking takes one or several of jsonl.*; got \['mlflow'\]$"):
        parse_args(["--tracking", "mlflow"])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tool_that_is_not_installed_names_its_extra(name, versions):
    del versions[name]
    parse_args([])
    with pytest.raises(UserError) as caught:
        parse_args(["--tracking", name])
    assert str(caught.value) == (
        f"--tracking {name} needs the package {name}, which is not installed; in this project's folder: "
        f'pip install -e ".[{name}]"'
    )


@pytest.mark.parametrize("name, old, new", [("tensorboard", "2.9.1", "3.0rc1"), ("wandb", "0.9.7", "0.100.0")])
def test_versions_are_compared_as_numbers(name, old, new, versions):
    versions[name] = old
    with pytest.raises(
        UserError, match=rf"needs {name}>={re.escape(tracking_args.MINIMUM_VERSIONS[name])}, and {old} is"
    ):
        parse_args(["--tracking", name])
    versions[name] = new
    assert parse_args(["--tracking", name]).tracking == ["jsonl", name]


def test_the_extras_admit_the_same_versions():
    text = (REPOSITORY / "pyproject.toml").read_text()
    for name, minimum in tracking_args.MINIMUM_VERSIONS.items():
        assert f'\n{name} = ["{name}>={minimum}"]' in text


@pytest.mark.parametrize(
    "option, value",
    [
        ("--wandb-project", "a/b"),
        ("--wandb-project", ""),
        ("--wandb-team", " us"),
        ("--wandb-group", "  "),
        ("--wandb-run-id", "run:1"),
        ("--wandb-run-id", "../x"),
    ],
)
def test_names_that_wandb_does_not_admit(option, value):
    with pytest.raises(UserError, match=rf"^{option} must be a name without space around it.*; got {value!r}$"):
        parse_args(["--tracking", "wandb", option, value])


def test_names_change_nothing_where_wandb_is_disabled(caplog):
    options = ["--tracking", "wandb", "--wandb-group", "seeds"]
    parse_args(options)
    assert not caplog.records
    parse_args([*options, "--wandb-mode", "disabled"])
    assert caplog.messages == ["wandb_group: no effect, since --wandb-mode disabled keeps nothing"]


def test_the_key_has_no_option():
    """A command line is visible to every user of a machine."""
    with pytest.raises(SystemExit):
        parse_args(["--tracking", "wandb", "--wandb-key", "secret"])


@pytest.mark.parametrize("statement", ["import miles.trainer", "from miles.trainer import main; main(['--help'])"])
def test_import_and_manual_load_no_tool(statement):
    code = (
        "import sys\n"
        f"try:\n    {statement}\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'tensorboard', 'wandb', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
