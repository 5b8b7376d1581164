"""Only files inside the checkout are read, whatever paths and links say."""

import os

import pytest

from miles.drop_in.checkout import Checkout
from miles.utils.errors import UserError


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    (folder / "pkg" / "inner").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_bytes(b"a = 1\r\n")
    (folder / "pkg" / "b.py").write_bytes(b"b = 1\n")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("[core]\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.py").write_text("outside = 1\n")
    return Checkout(folder)


def test_reads_bytes_as_they_are(checkout):
    assert checkout.read("pkg/a.py") == b"a = 1\r\n"
    assert checkout.read_if_there("pkg/a.py") == b"a = 1\r\n"


def test_a_file_that_is_not_there(checkout):
    assert not checkout.exists("pkg/c.py")
    assert checkout.read_if_there("pkg/c.py") is None
    with pytest.raises(UserError, match=r"pkg/c\.py is not in the checkout"):
        checkout.read("pkg/c.py")


def test_a_folder_is_no_file(checkout):
    assert checkout.exists("pkg")
    with pytest.raises(UserError, match=r"pkg has to be a file"):
        checkout.read("pkg")


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../outside/a.py", "pkg/../../outside/a.py", "pkg/../pkg/a.py", "", ".", "pkg\\a.py", "a\0b"],
)
@pytest.mark.parametrize("method", ["read", "exists", "inside", "locate", "mode", "read_if_there"])
def test_paths_that_leave_are_refused(checkout, path, method):
    with pytest.raises(UserError, match=r"only files inside the checkout are touched, by a relative path; got"):
        getattr(checkout, method)(path)


def test_links_that_leave_are_refused(checkout, tmp_path):
    (checkout.root / "pkg" / "file.py").symlink_to(tmp_path / "outside" / "a.py")
    (checkout.root / "folder").symlink_to(tmp_path / "outside")
    (checkout.root / "relative.py").symlink_to("../outside/a.py")
    for path in ("pkg/file.py", "folder/a.py", "folder/new.py", "relative.py"):
        for method in (checkout.read, checkout.exists, checkout.read_if_there):
            with pytest.raises(
                UserError, match=r"reached through a link out of the checkout .*, which is not followed"
            ):
                method(path)


def test_a_link_inside_stands_for_its_file(checkout):
    (checkout.root / "link.py").symlink_to("pkg/a.py")
    (checkout.root / "folder").symlink_to("pkg")
    assert checkout.inside("link.py") == "pkg/a.py"
    assert checkout.inside("folder/b.py") == "pkg/b.py"
    assert checkout.read("folder/b.py") == b"b = 1\n"


def test_a_loop_of_links(checkout):
    (checkout.root / "one.py").symlink_to("two.py")
    (checkout.root / "two.py").symlink_to("one.py")
    with pytest.raises(UserError, match=r"one\.py (is a link that leads nowhere|is not in the checkout)"):
        checkout.read("one.py")


@pytest.mark.parametrize("path", [".git/config", "link/config"])
def test_git_is_not_touched(checkout, path):
    (checkout.root / "link").symlink_to(".git")
    with pytest.raises(UserError, match=r"belongs to git, and is not touched"):
        checkout.read(path)


def test_lists_a_folder_without_what_leads_out(checkout, tmp_path):
    (checkout.root / "pkg" / "out.py").symlink_to(tmp_path / "outside" / "a.py")
    (checkout.root / "pkg" / "dangling.py").symlink_to("nothing.py")
    assert checkout.list("pkg") == ["pkg/a.py", "pkg/b.py", "pkg/inner"]
    assert checkout.list() == ["pkg"]
    assert checkout.list("nowhere") == []


def test_a_view_has_other_contents_and_writes_nothing(checkout):
    (checkout.root / "link.py").symlink_to("pkg/a.py")
    view = checkout.seen_with({"link.py": b"x", "pkg/b.py": None, "pkg/new.py": b"new"})
    assert view.read("pkg/a.py") == b"x"
    assert view.read("pkg/new.py") == b"new"
    assert not view.exists("pkg/b.py")
    assert view.list("pkg") == ["pkg/a.py", "pkg/inner", "pkg/new.py"]
    with pytest.raises(UserError, match=r"pkg/b\.py is not in the checkout"):
        view.read("pkg/b.py")
    again = view.seen_with({"pkg/b.py": b"again"})
    assert (again.read("pkg/b.py"), again.read("pkg/a.py")) == (b"again", b"x")
    assert checkout.read("pkg/a.py") == b"a = 1\r\n"
    assert checkout.list("pkg") == ["pkg/a.py", "pkg/b.py", "pkg/inner"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(checkout):
    checkout.locate("pkg/a.py").chmod(0)
    with pytest.raises(UserError, match=r"pkg/a\.py cannot be read: Permission denied"):
        checkout.read("pkg/a.py")


def test_a_file_that_fails_to_be_read(checkout, monkeypatch):
    def fail(self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(UserError, match=r"pkg/a\.py cannot be read: Input/output error; repair it, or"):
        checkout.read("pkg/a.py")


def test_the_root_has_to_be_a_folder(checkout):
    with pytest.raises(UserError, match=r"CHECKOUT must be the folder .*a\.py' is no folder"):
        Checkout(checkout.root / "pkg" / "a.py")
