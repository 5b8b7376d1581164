"""Which files git does not have as they are."""

import subprocess

import pytest

from miles.drop_in.checkout import Checkout
from miles.drop_in.git_status import uncommitted
from miles.utils.errors import UserError
from tests.fast.drop_in.toy import commit_all, git

FILES = ["pkg/a.py", "pkg/b.py"]


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "outer"
    (folder / "pkg").mkdir(parents=True)
    for path in FILES:
        (folder / path).write_text("x = 1\n")
    return folder


def test_clean(repository):
    commit_all(repository)
    assert uncommitted(Checkout(repository), FILES) == []
    (repository / "pkg/a.py").touch()
    assert uncommitted(Checkout(repository), FILES) == []


@pytest.mark.parametrize("staged", [False, True])
def test_changed(repository, staged):
    commit_all(repository)
    (repository / "pkg/b.py").write_text("x = 2\n")
    if staged:
        git(repository, "add", "-A")
    assert uncommitted(Checkout(repository), FILES) == ["pkg/b.py"]
    assert uncommitted(Checkout(repository), FILES[:1]) == []
    assert uncommitted(Checkout(repository), []) == []


def test_a_checkout_in_a_folder_of_a_repository(repository):
    commit_all(repository)
    (repository / "pkg/b.py").write_text("x = 2\n")
    assert uncommitted(Checkout(repository / "pkg"), ["a.py", "b.py"]) == ["b.py"]


def test_untracked_and_ignored(repository):
    (repository / ".gitignore").write_text("b.py\n")
    git(repository, "init", "-q")
    git(repository, "add", ".gitignore")
    git(repository, "commit", "-q", "-m", "state")
    assert uncommitted(Checkout(repository), FILES) == FILES


def test_nothing_committed_yet(repository):
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    assert uncommitted(Checkout(repository), FILES) == FILES


def test_names_that_are_not_plain(repository):
    names = [":(top)x.py", "pkg/with space.py", "pkg/–.py", "pkg/[ab].py", "pkg/*.py"]
    for name in names:
        (repository / name).write_text("x = 1\n")
    commit_all(repository)
    assert uncommitted(Checkout(repository), names) == []
    (repository / names[2]).write_text("x = 2\n")
    (repository / "pkg/a.py").write_text("x = 2\n")
    assert uncommitted(Checkout(repository), names) == [names[2]]


def test_not_a_repository(repository, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parent))
    assert uncommitted(Checkout(repository), FILES) is None


def test_git_is_missing(repository, monkeypatch):
    commit_all(repository)
    monkeypatch.setenv("PATH", str(repository))
    assert uncommitted(Checkout(repository), FILES) is None


def test_the_repository_of_a_hook_is_not_the_checkout(repository, tmp_path, monkeypatch):
    commit_all(repository)
    subprocess.run(["git", "init", "-q", str(tmp_path / "other")], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert uncommitted(Checkout(repository), FILES) == []


def test_git_refuses(repository):
    commit_all(repository)
    (repository / ".git" / "index").write_bytes(b"broken")
    message = "git cannot say whether files of .* have uncommitted changes: .*index.*\n.*pass --force to go on"
    with pytest.raises(UserError, match=message):
        uncommitted(Checkout(repository), FILES)
