"""`--check`: in, whole and current; not in; or neither. And an older version of the drop-in that is in."""

import pytest

from miles.drop_in.commands import tool_version
from miles.drop_in.record import RECORD_PATH
from tests.fast.drop_in.toy import OPTIONS, OPTIONS_AFTER, STEP_AFTER, ToyHost, commit_all, git, snapshot


class TestCheck:
    def test_not_in(self, toy, drop_in, capsys):
        assert drop_in(toy, "--check") == 1
        assert capsys.readouterr().out == f"the drop-in in {toy} is not in\n"

    def test_in(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        capsys.readouterr()
        assert drop_in(toy, "--check") == 0
        assert capsys.readouterr().out == f"the drop-in in {toy} is in, whole and current\n"

    def test_in_with_changes_elsewhere(self, toy, drop_in):
        drop_in(toy, "--apply")
        (toy / "toy/step.py").write_text("# first\n" + STEP_AFTER)
        assert drop_in(toy, "--check") == 0

    def test_in_with_a_comment_between_an_edit_and_its_seam(self, toy, drop_in):
        """A new apply would write the option below the comment; that is no reason to move it."""
        drop_in(toy, "--apply")
        commented = OPTIONS_AFTER.replace("    return parser", "    # mine\n    return parser")
        (toy / "toy/options.py").write_text(commented)
        for option in ("--check", "--apply"):
            assert drop_in(toy, option) == 0
            assert (toy / "toy/options.py").read_text() == commented
        assert drop_in(toy, "--revert", "--force") == 0
        assert (toy / "toy/options.py").read_text() == OPTIONS.replace("    return p", "    # mine\n    return p")

    def test_damaged(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        (toy / "toy/step.py").write_text(STEP_AFTER.replace("choose(scale)", "scale"))
        assert drop_in(toy, "--check") == 2
        assert "is damaged: the drop-in in" in capsys.readouterr().out

    def test_a_seam_that_has_gone_since(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        step = STEP_AFTER.replace("def step", "KEYS = []\n\n\ndef step")
        (toy / "toy/step.py").write_text(step)
        assert drop_in(toy, "--check") == 2
        assert "seam 'keys' of toy/step.py: there are 2 such lists" in capsys.readouterr().out

    def test_in_part(self, toy, drop_in, capsys):
        drop_in(toy, "--apply")
        git(toy, "checkout", "-q", "--", "toy/step.py")
        assert drop_in(toy, "--check") == 2
        words = f"the drop-in in {toy} is in part: these are as before the drop-in: toy/step.py; --apply brings them"
        assert capsys.readouterr().out.endswith(f"{words} up to date\n")
        assert drop_in(toy, "--apply") == 0
        assert drop_in(toy, "--check") == 0

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            (b"{", "is not the record that --apply wrote"),
            (b"\xff", "is not the record that --apply wrote"),
            (b"[]", "is not the record that --apply wrote"),
            (b'{"format": 1}', "is not the record that --apply wrote (KeyError('version'))"),
            (b'{"format": 2}', "has format 2, this version reads 1; use the version of miles that wrote it"),
        ],
    )
    def test_a_record_that_is_none(self, toy, drop_in, capsys, record, message):
        drop_in(toy, "--apply")
        (toy / RECORD_PATH).write_bytes(record)
        assert drop_in(toy, "--check") == 2
        assert message in capsys.readouterr().out
        for option in ([], ["--apply"], ["--revert"]):
            assert drop_in(toy, *option) == 2
            assert message in capsys.readouterr().err

    def test_of_another_version(self, toy, drop_in, capsys, monkeypatch):
        drop_in(toy, "--apply")
        monkeypatch.setattr("tests.fast.drop_in.toy.OptionSeam.written", 'parser.add_argument("--mode", type=str)')
        capsys.readouterr()
        assert drop_in(toy, "--check") == 2
        out = capsys.readouterr().out
        assert (
            f"is of another version (written by miles {tool_version()}, this is {tool_version()}), which would" in out
        )
        assert out.endswith("which would write otherwise: toy/options.py; --apply brings them up to date\n")

    def test_files_taken_back_and_of_another_version(self, toy, drop_in, capsys, monkeypatch):
        drop_in(toy, "--apply")
        (toy / "toy/loss/inner/loss_aggregation.py").unlink()
        monkeypatch.setattr("tests.fast.drop_in.toy.OptionSeam.written", 'parser.add_argument("--mode", type=str)')
        capsys.readouterr()
        assert drop_in(toy, "--check") == 2
        out = capsys.readouterr().out
        assert "in part: these are as before the drop-in: toy/loss/inner/loss_aggregation.py; of another" in out
        assert "would write otherwise: toy/options.py; --apply brings" in out


class TestAnotherVersion:
    """The lines that an older version wrote are replaced by this one's."""

    def test_apply_brings_it_up_to_date_and_revert_gives_the_original(self, toy, drop_in, capsys, monkeypatch):
        before = snapshot(toy)
        drop_in(toy, "--apply")
        commit_all(toy)
        monkeypatch.setattr("tests.fast.drop_in.toy.OptionSeam.written", 'parser.add_argument("--mode", type=str)')
        capsys.readouterr()
        assert drop_in(toy) == 0
        out = capsys.readouterr().out
        assert '-    parser.add_argument("--mode")\n+    parser.add_argument("--mode", type=str)\n' in out
        assert "--apply writes these 2 files:" in out  # the options and the record
        assert drop_in(toy, "--apply") == 0
        assert drop_in(toy, "--check") == 0
        assert drop_in(toy, "--revert") == 0
        assert snapshot(toy) == before

    def test_a_file_that_it_leaves_alone_goes_back(self, toy, drop_in):
        original = snapshot(toy)
        drop_in(toy, "--apply")
        smaller = ToyHost(new_files={}, seams=ToyHost().seams[1:])
        assert drop_in(toy, "--apply", host=smaller) == 0
        assert (toy / "toy/options.py").read_text() == OPTIONS
        assert not (toy / "toy/loss/inner/loss_aggregation.py").exists()
        assert drop_in(toy, "--check", host=smaller) == 0
        assert drop_in(toy, "--revert", host=smaller) == 0
        assert snapshot(toy) == original
