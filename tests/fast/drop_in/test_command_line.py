"""`python -m miles.drop_in` as a person meets it: what it prints, writes, refuses and returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.drop_in.__main__ import main
from miles.drop_in.record import RECORD_PATH
from tests.fast.drop_in.toy import (
    OPTIONS,
    OPTIONS_AFTER,
    STEP,
    STEP_AFTER,
    commit_all,
    git,
    make_toy,
    snapshot,
)

LOSS_AGGREGATION = Path(__file__).parents[3] / "miles" / "backends" / "training_utils" / "loss_aggregation.py"


class TestPlan:
    def test_prints_host_seams_with_file_and_line_and_the_diff(self, toy, drop_in, capsys):
        assert drop_in(toy) == 0
        out = capsys.readouterr().out
        assert f"toy, layout 2026-01, in {toy}" in out
        assert "toy/options.py:6  option: one more option" in out
        assert "toy/step.py:3     keys: one more key that is carried" in out
        assert "toy/step.py:7     scale: the reducer is chosen" in out
        assert '-KEYS = ["rows", "masks"]\n+KEYS = ["rows", "masks", "weights"]\n' in out
        assert "--- /dev/null\n+++ b/toy/loss/inner/loss_aggregation.py\n" in out
        assert "nothing is written yet; --apply writes these 4 files:" in out

    def test_writes_nothing(self, toy, drop_in):
        before = snapshot(toy)
        assert drop_in(toy) == 0
        assert snapshot(toy) == before

    def test_the_diff_is_one_that_git_applies(self, toy, drop_in, capsys):
        drop_in(toy)
        out = capsys.readouterr().out
        diff = out[out.index("--- ") : out.index("nothing is written yet")]
        subprocess.run(["git", "-C", str(toy), "apply"], input=diff, text=True, check=True)
        assert (toy / "toy/options.py").read_text() == OPTIONS_AFTER
        assert (toy / "toy/step.py").read_text() == STEP_AFTER
        assert (toy / "toy/loss/inner/loss_aggregation.py").read_bytes() == LOSS_AGGREGATION.read_bytes()

    def test_says_what_apply_would_refuse(self, toy, drop_in, capsys):
        (toy / "toy/step.py").write_text(STEP + "# mine\n")
        assert drop_in(toy) == 0
        note = "note: uncommitted changes, which --apply refuses without --force: toy/step.py"
        assert note in capsys.readouterr().out

    def test_says_that_it_is_in(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        capsys.readouterr()
        assert drop_in(toy) == 0
        out = capsys.readouterr().out
        assert "the drop-in is in, whole and current: nothing to do" in out
        assert "--- " not in out

    def test_prints_what_the_terminal_cannot_show(self, tmp_path):
        folder = make_toy(
            tmp_path, options=OPTIONS.replace("add_options(parser):", "add_options(parser):  # –").encode()
        )
        code = (
            "import sys; from miles.drop_in.__main__ import main; from tests.fast.drop_in.toy import *; "
            "sys.exit(main([sys.argv[1]], detect=detecting(ToyHost())))"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert "add_options(parser):  # \\u2013" in result.stdout


class TestApply:
    def test_writes_the_edits_the_new_file_and_the_record(self, toy, drop_in, capsys):
        before = snapshot(toy)
        assert drop_in(toy, "--apply") == 0
        after = snapshot(toy)
        assert set(after) - set(before) == {
            RECORD_PATH,
            "toy/loss",
            "toy/loss/inner",
            "toy/loss/inner/loss_aggregation.py",
        }
        assert (toy / "toy/options.py").read_text() == OPTIONS_AFTER
        assert (toy / "toy/step.py").read_text() == STEP_AFTER
        assert (toy / "toy/loss/inner/loss_aggregation.py").read_bytes() == LOSS_AGGREGATION.read_bytes()
        assert after["README"] == before["README"]
        out = capsys.readouterr().out
        assert "written, 4 files:" in out
        assert "read the change and commit it; --revert takes it out again" in out

    def test_twice_is_once(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        once = snapshot(toy)
        capsys.readouterr()
        assert drop_in(toy, "--apply") == 0
        assert snapshot(toy) == once
        assert "nothing to do" in capsys.readouterr().out

    def test_refuses_uncommitted_changes(self, toy, drop_in, capsys):
        (toy / "toy/step.py").write_text(STEP + "# mine\n")
        before = snapshot(toy)
        assert drop_in(toy, "--apply") == 2
        assert snapshot(toy) == before
        err = capsys.readouterr().err
        assert err.startswith("error: uncommitted changes in files to be written: toy/step.py\n")
        assert "pass --force" in err

    def test_uncommitted_changes_elsewhere_do_not_matter(self, toy, drop_in):
        (toy / "README").write_text("another\n")
        (toy / "toy/other.py").write_text("x = 1\n")
        assert drop_in(toy, "--apply") == 0

    def test_force_writes_into_them_and_revert_gives_them_back(self, toy, drop_in):
        (toy / "toy/step.py").write_text(STEP + "# mine\n")
        before = snapshot(toy)
        assert drop_in(toy, "--apply", "--force") == 0
        assert (toy / "toy/step.py").read_text() == STEP_AFTER + "# mine\n"
        assert drop_in(toy, "--revert") == 0
        assert snapshot(toy) == before

    def test_a_folder_that_is_no_repository_is_written_with_a_note(self, tmp_path, drop_in, capsys):
        folder = make_toy(tmp_path)
        assert drop_in(folder) == 0
        assert "note: not a git repository" in capsys.readouterr().out
        assert drop_in(folder, "--apply") == 0
        assert (folder / "toy/step.py").read_text() == STEP_AFTER

    def test_a_missing_seam_stops_everything_and_says_what_to_do(self, tmp_path, drop_in, capsys):
        step = STEP.replace("total = scale(rows)", "total = scaled(rows)").replace("KEYS", "NAMES")
        folder = make_toy(tmp_path, step=step.encode())
        before = snapshot(folder)
        assert drop_in(folder, "--apply") == 2
        assert snapshot(folder) == before
        err = capsys.readouterr().err
        assert "2 of 3 seams cannot be edited, so nothing is:" in err
        assert "seam 'keys' of toy/step.py: there are 0 such lists" in err
        assert "it looked for: total = scale(rows)" in err
        assert "to do it by hand: write reduce(rows) instead" in err

    def test_a_link_as_the_checkout_is_followed(self, toy, drop_in, tmp_path):
        (tmp_path / "link").symlink_to(toy)
        assert drop_in(tmp_path / "link", "--apply") == 0
        assert (toy / "toy/step.py").read_text() == STEP_AFTER


class TestRevert:
    def test_gives_everything_back(self, toy, drop_in, capsys):
        before = snapshot(toy)
        drop_in(toy, "--apply")
        capsys.readouterr()
        assert drop_in(toy, "--revert") == 0
        assert snapshot(toy) == before
        assert git(toy, "status", "--porcelain") == ""
        assert f"taken out of {toy}:\n  toy/loss/inner/loss_aggregation.py\n" in capsys.readouterr().out

    def test_twice_is_once(self, toy, drop_in, capsys):
        before = snapshot(toy)
        drop_in(toy, "--apply")
        drop_in(toy, "--revert")
        capsys.readouterr()
        assert drop_in(toy, "--revert") == 0
        assert snapshot(toy) == before
        assert f"the drop-in is not in {toy} (there is no {RECORD_PATH}): nothing to do" in capsys.readouterr().out

    def test_after_a_commit(self, toy, drop_in):
        before = snapshot(toy)
        drop_in(toy, "--apply")
        commit_all(toy)
        assert drop_in(toy, "--revert") == 0
        assert snapshot(toy) == before

    def test_keeps_what_was_changed_elsewhere(self, toy, drop_in):
        drop_in(toy, "--apply")
        step = (toy / "toy/step.py").read_text()
        (toy / "toy/step.py").write_text("# first\n" * 40 + step.replace("len(rows)", "max(len(rows), 1)"))
        commit_all(toy)
        assert drop_in(toy, "--revert") == 0
        assert (toy / "toy/step.py").read_text() == "# first\n" * 40 + STEP.replace("len(rows)", "max(len(rows), 1)")
        assert (toy / "toy/options.py").read_text() == OPTIONS

    def test_refuses_uncommitted_changes_of_the_person_only(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        (toy / "toy/step.py").write_text(STEP_AFTER + "# mine\n")
        before = snapshot(toy)
        assert drop_in(toy, "--revert") == 2
        assert snapshot(toy) == before
        assert "uncommitted changes in files to be written: toy/step.py\n" in capsys.readouterr().err
        assert drop_in(toy, "--revert", "--force") == 0
        assert (toy / "toy/step.py").read_text() == STEP + "# mine\n"

    @pytest.mark.parametrize("force", [[], ["--force"]])
    def test_refuses_where_the_written_lines_have_changed(self, toy, drop_in, capsys, force):
        drop_in(toy, "--apply")
        (toy / "toy/step.py").write_text(STEP_AFTER.replace("choose(scale)", "choose(scale, 2)"))
        commit_all(toy)
        before = snapshot(toy)
        assert drop_in(toy, "--revert", *force) == 2
        assert snapshot(toy) == before
        err = capsys.readouterr().err
        assert f"the drop-in in {toy} is not as it was written:" in err
        assert (
            "toy/step.py, about line 7: these lines were written, and they are not there as they were written" in err
        )
        assert "    total = choose(scale)(rows)\n" in err
        assert "put them back as they were" in err

    def test_names_every_place_that_has_changed(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        (toy / "toy/options.py").unlink()
        (toy / "toy/loss/inner/loss_aggregation.py").write_text("mine\n")
        assert drop_in(toy, "--revert") == 2
        err = capsys.readouterr().err
        assert "toy/options.py is gone; put the file back" in err
        assert "toy/loss/inner/loss_aggregation.py is a file of the drop-in and has been changed" in err

    def test_leaves_a_folder_that_something_else_moved_into(self, toy, drop_in):
        drop_in(toy, "--apply")
        (toy / "toy/loss/mine.py").write_text("x = 1\n")
        assert drop_in(toy, "--revert") == 0
        assert sorted(path.name for path in (toy / "toy/loss").iterdir()) == ["mine.py"]

    def test_finishes_what_git_began(self, toy, drop_in):
        before = snapshot(toy)
        drop_in(toy, "--apply")
        git(toy, "checkout", "-q", "--", "toy/step.py")
        (toy / "toy/loss/inner/loss_aggregation.py").unlink()
        assert drop_in(toy, "--revert") == 0
        assert snapshot(toy) == before


class TestErrors:
    @pytest.mark.parametrize("path", ["nowhere", ""])
    def test_no_such_folder(self, toy, drop_in, capsys, monkeypatch, path):
        """An empty path is not the working directory."""
        monkeypatch.chdir(toy)
        for option in ([], ["--apply"], ["--check"], ["--revert"]):
            assert drop_in(path, *option) == 2
            message = f"CHECKOUT must be the folder of a Miles or slime checkout; {path!r} is no folder"
            assert capsys.readouterr().err == f"error: {message}\n"

    @pytest.mark.parametrize("option", [[], ["--apply"], ["--check"], ["--revert"]])
    def test_no_known_host(self, tmp_path, drop_in, capsys, option):
        assert drop_in(tmp_path, *option) == 2
        assert capsys.readouterr().err == "error: no known host: it looked for toy/\n"

    def test_no_known_host_with_the_real_registry(self, tmp_path, capsys):
        assert main([str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith("error: ")

    @pytest.mark.parametrize("options", [["--apply", "--revert"], ["--check", "--apply"], ["--reverse"]])
    def test_options_that_do_not_go_together(self, toy, drop_in, options):
        with pytest.raises(SystemExit) as stopped:
            drop_in(toy, *options)
        assert stopped.value.code == 2

    @pytest.mark.parametrize("options", [["--force"], ["--force", "--check"]])
    def test_force_without_anything_to_force(self, toy, drop_in, capsys, options):
        with pytest.raises(SystemExit) as stopped:
            drop_in(toy, *options)
        assert stopped.value.code == 2
        assert "--force goes with --apply or --revert, which write files" in capsys.readouterr().err

    @pytest.mark.parametrize("option", [[], ["--apply"], ["--revert"], ["--check"]])
    def test_libcst_is_missing(self, toy, drop_in, capsys, monkeypatch, option):
        monkeypatch.setitem(sys.modules, "libcst", None)
        assert drop_in(toy, *option) == 2
        message = "error: the edits are made with LibCST, which is not installed; in this project's folder: "
        assert capsys.readouterr().err == f'{message}pip install -e ".[drop-in]"\n'

    def test_ctrl_c(self, toy, drop_in, capsys, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        before = snapshot(toy)
        monkeypatch.setattr("miles.drop_in.apply._stage", interrupt)
        assert drop_in(toy, "--apply") == 130
        assert snapshot(toy) == before
        assert "stopped; --check says whether the drop-in is in" in capsys.readouterr().err

    def test_is_a_module_to_run(self, tmp_path):
        result = subprocess.run(
            [sys.executable, "-m", "miles.drop_in", str(tmp_path / "nowhere")],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith("error: CHECKOUT must be the folder")
