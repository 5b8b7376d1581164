"""What a plan refuses, and that it reads a host's files as they are."""

import pytest

from miles.drop_in.checkout import Checkout
from miles.drop_in.plan import SeamsError, make_plan
from miles.drop_in.seam import SeamError, Site
from miles.utils.errors import UserError
from tests.fast.drop_in.toy import OPTIONS, STEP, OptionSeam, ToyHost, make_toy


def plan_of(folder, host=None):
    return make_plan(host or ToyHost(), Checkout(folder))


def test_sites_are_lines_of_the_file_as_it_is(tmp_path):
    plan = plan_of(make_toy(tmp_path, step=("# one\n# two\n" + STEP).encode()))
    assert [(seam.name, site) for seam, site in plan.sites] == [
        ("option", Site("toy/options.py", 6)),
        ("keys", Site("toy/step.py", 5)),
        ("scale", Site("toy/step.py", 9)),
    ]
    assert [change.path for change in plan.changes] == [
        "toy/loss/inner/loss_aggregation.py",
        "toy/options.py",
        "toy/step.py",
    ]


def test_all_missing_seams_are_named_in_their_order(tmp_path):
    folder = make_toy(tmp_path, step=b"x = 1\n")
    (folder / "toy/options.py").unlink()
    with pytest.raises(SeamsError, match="3 of 3 seams cannot be edited, so nothing is:") as error:
        plan_of(folder)
    assert [(each.seam, each.path, each.reason) for each in error.value.errors] == [
        ("option", "toy/options.py", "there is no such file"),
        ("keys", "toy/step.py", "there are 0 such lists"),
        ("scale", "toy/step.py", "there is no such call"),
    ]


def test_a_seam_error_says_what_it_looked_for_and_how_to_do_it_by_hand():
    error = OptionSeam("toy/options.py").error("there is no such function")
    assert isinstance(error, SeamError)
    assert str(error) == (
        "seam 'option' of toy/options.py: there is no such function\n"
        "  it looked for: add_options(parser) with a return\n"
        "  to do it by hand: add --mode before the return"
    )
    assert (error.seam, error.path) == ("option", "toy/options.py")
    assert (error.looked_for, error.by_hand) == (OptionSeam.looked_for, OptionSeam.by_hand)


def test_the_edits_of_one_file_build_on_each_other_in_a_link_too(tmp_path):
    folder = make_toy(tmp_path)
    (folder / "toy/step.py").rename(folder / "toy/real.py")
    (folder / "toy/step.py").symlink_to("real.py")
    plan = plan_of(folder)
    change = next(change for change in plan.changes if change.path == "toy/real.py")
    assert b'"weights"' in change.after
    assert b"choose(scale)" in change.after


def test_a_file_to_be_added_that_is_there(tmp_path):
    folder = make_toy(tmp_path)
    (folder / "toy/loss/inner").mkdir(parents=True)
    (folder / "toy/loss/inner/loss_aggregation.py").write_text("mine\n")
    with pytest.raises(UserError, match=r"loss_aggregation\.py is to be added and is there already, though no record"):
        plan_of(folder)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (b"\xff\xfe", r"toy/step\.py is not UTF-8 \(byte 0\); the edits are made in UTF-8 files only"),
        (b"x = 1\ndef f(:\n", r"toy/step\.py is not Python that LibCST reads: line 2"),
        (b"x = 1\nif x:\n  y\n    z\n", r"toy/step\.py is not Python that LibCST reads: line 4"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, step, message):
    with pytest.raises(UserError, match=message):
        plan_of(make_toy(tmp_path, step=step))


def test_a_file_that_libcst_does_not_give_back(tmp_path, monkeypatch):
    monkeypatch.setattr("libcst.Module.code", "other")
    with pytest.raises(UserError, match="does not survive LibCST unchanged, so it is not edited"):
        plan_of(make_toy(tmp_path))


def test_a_seam_that_changes_nothing_is_a_fault_of_the_tool(tmp_path, monkeypatch):
    monkeypatch.setattr(OptionSeam, "edit", lambda self, module: module)
    with pytest.raises(AssertionError, match="seam option found its place and changed nothing"):
        plan_of(make_toy(tmp_path))


def test_text_that_is_not_ascii_stays(tmp_path):
    change = next(change for change in plan_of(make_toy(tmp_path)).changes if change.path == "toy/options.py")
    assert OPTIONS.splitlines()[0].encode() in change.after
