"""`--skip`: a seam that was changed beyond recognition is left to the person, and all others are written."""

import json
from dataclasses import replace

import libcst as cst
import pytest

from miles.drop_in.__main__ import main
from miles.drop_in.checkout import Checkout
from miles.drop_in.hosts import detect_host
from miles.drop_in.plan import make_plan
from miles.drop_in.record import RECORD_PATH
from tests.fast.drop_in.small_hosts import HERE, HOSTS, copy_host, run_host
from tests.fast.drop_in.test_damaged_hosts import damaged, each_seam
from tests.fast.drop_in.test_small_hosts import SAMPLES, STEP, check
from tests.fast.drop_in.toy import OPTIONS, OPTIONS_AFTER, STEP_AFTER, commit_all, make_toy, snapshot
from tests.fast.drop_in.toy import STEP as TOY_STEP

CHANGED = TOY_STEP.replace("total = scale(rows)", "total = scaled(rows)")


@pytest.fixture
def changed_toy(tmp_path):
    """The toy host, whose last seam is not to be found."""
    folder = make_toy(tmp_path, step=CHANGED.encode())
    commit_all(folder)
    return folder


class TestToy:
    def test_the_refusal_names_the_way_out(self, changed_toy, drop_in, capsys):
        assert drop_in(changed_toy, "--apply") == 2
        err = capsys.readouterr().err
        assert "1 of 3 seams cannot be edited, so nothing is:" in err
        assert (
            "to have all others written: --skip scale; what is skipped is left to you, by hand as said above, with "
            "the import of the adapter where it is called" in err
        )

    def test_the_way_out_keeps_what_was_skipped_before(self, changed_toy, drop_in, capsys):
        assert drop_in(changed_toy, "--skip", "option") == 2
        err = capsys.readouterr().err
        assert "1 of 2 seams cannot be edited" in err
        assert "to have all others written: --skip option,scale;" in err

    def test_the_plan_shows_what_is_left(self, changed_toy, drop_in, capsys):
        before = snapshot(changed_toy)
        assert drop_in(changed_toy, "--skip", "scale") == 0
        assert snapshot(changed_toy) == before
        out = capsys.readouterr().out
        assert (
            "  toy/step.py:3     keys: one more key that is carried\n"
            "seams left to you (--skip):\n"
            "  toy/step.py  scale: the reducer is chosen\n"
            "    by hand: write reduce(rows) instead\n"
            "new files:\n" in out
        )

    def test_everything_else_is_written_kept_checked_and_reverted(self, changed_toy, drop_in, capsys):
        before = snapshot(changed_toy)
        assert drop_in(changed_toy, "--apply", "--skip", "scale") == 0
        assert "    by hand: write reduce(rows) instead\n" in capsys.readouterr().out
        written = CHANGED.replace('"masks"]', '"masks", "weights"]')
        assert (changed_toy / "toy/step.py").read_text() == written
        assert (changed_toy / "toy/options.py").read_text() == OPTIONS_AFTER
        after = snapshot(changed_toy)
        for options in (["--apply"], [], ["--apply", "--skip", "scale"]):
            assert drop_in(changed_toy, *options) == 0
            assert "the drop-in is in, whole and current: nothing to do" in capsys.readouterr().out
            assert snapshot(changed_toy) == after
        assert drop_in(changed_toy, "--check") == 0
        words = (
            f"the drop-in in {changed_toy} is in, whole and current; by hand, and not checked: scale (toy/step.py)\n"
        )
        assert capsys.readouterr().out == words
        assert drop_in(changed_toy, "--revert") == 0
        words = "these seams were left to you; take your own lines out by hand: scale\n"
        assert capsys.readouterr().out.endswith(words)
        assert snapshot(changed_toy) == before

    def test_by_hand_before_and_after(self, changed_toy, drop_in):
        by_hand = CHANGED.replace("scaled(rows)", "reduce(rows)")
        drop_in(changed_toy, "--apply", "--skip", "scale")
        path = changed_toy / "toy/step.py"
        path.write_text(path.read_text().replace("scaled(rows)", "reduce(rows)"))
        for option in ("--check", "--apply"):
            assert drop_in(changed_toy, option) == 0
        commit_all(changed_toy)
        assert drop_in(changed_toy, "--revert") == 0
        assert path.read_text() == by_hand
        commit_all(changed_toy)
        assert drop_in(changed_toy, "--apply", "--skip", "scale") == 0
        assert path.read_text() == by_hand.replace('"masks"]', '"masks", "weights"]')

    def test_a_seam_that_is_in_is_taken_out_again(self, toy, drop_in):
        drop_in(toy, "--apply")
        assert drop_in(toy, "--apply", "--skip", "option") == 0
        assert (toy / "toy/options.py").read_text() == OPTIONS
        assert (toy / "toy/step.py").read_text() == STEP_AFTER
        assert drop_in(toy, "--apply", "--skip", "scale, keys") == 0
        assert (toy / "toy/step.py").read_text() == TOY_STEP
        assert json.loads((toy / RECORD_PATH).read_text())["skipped"] == ["option", "keys", "scale"]
        assert drop_in(toy, "--check") == 0

    def test_all_files_as_before_still_records_the_names(self, toy, drop_in):
        drop_in(toy, "--apply")
        (toy / "toy/options.py").write_text(OPTIONS)
        assert drop_in(toy, "--apply", "--skip", "option") == 0
        assert drop_in(toy, "--check") == 0
        assert (toy / "toy/options.py").read_text() == OPTIONS

    def test_a_record_from_before_there_were_skips(self, toy, drop_in):
        drop_in(toy, "--apply")
        record = json.loads((toy / RECORD_PATH).read_text())
        del record["skipped"]
        (toy / RECORD_PATH).write_text(json.dumps(record))
        assert drop_in(toy, "--check") == 0

    def test_a_recorded_name_that_is_no_more(self, toy, drop_in):
        drop_in(toy, "--apply", "--skip", "option")
        record = (toy / RECORD_PATH).read_text()
        (toy / RECORD_PATH).write_text(record.replace('"option"', '"choice"'))
        assert drop_in(toy, "--check") == 2
        assert drop_in(toy, "--apply") == 0
        assert (toy / "toy/options.py").read_text() == OPTIONS_AFTER

    @pytest.mark.parametrize(("names", "unknown"), [("scale,sums", "'sums'"), ("", "''"), ("a,b", "'a', 'b'")])
    def test_unknown_names(self, toy, drop_in, capsys, names, unknown):
        before = snapshot(toy)
        assert drop_in(toy, "--apply", "--skip", names) == 2
        assert snapshot(toy) == before
        assert capsys.readouterr().err == (
            f"error: --skip takes names of seams of toy, separated by commas; {unknown} is none. "
            "Choose from option, keys, scale\n"
        )

    @pytest.mark.parametrize("action", ["--revert", "--check"])
    def test_it_goes_with_what_plans(self, toy, drop_in, capsys, action):
        with pytest.raises(SystemExit) as stopped:
            drop_in(toy, action, "--skip", "scale")
        assert stopped.value.code == 2
        assert (
            "--skip goes with --apply, or with no action; --revert and --check take it from" in capsys.readouterr().err
        )


def changed(seam, module):
    """Make the edit by hand."""
    return seam.edit(module)


@each_seam
def test_each_seam_can_be_made_by_hand_and_skipped(host, seam):
    """By hand and by the tool, in whichever order, is the whole."""
    untouched = Checkout(HERE / "hosts" / host)
    known = detect_host(untouched)
    same_file = replace(known, seams=tuple(each for each in known.seams if each.path == seam.path))
    by_hand = damaged(host, seam, changed)
    plan = make_plan(same_file, untouched.seen_with(by_hand), skip=[seam.name])
    assert [each.name for each in plan.skipped] == [seam.name]
    assert [each.name for each, _ in plan.sites] == [each.name for each in same_file.seams if each.name != seam.name]
    edited = by_hand | {change.path: change.after for change in plan.changes}
    for change in make_plan(same_file, untouched).changes:
        # Where two seams edit next to each other, their lines are in another order then.
        assert sorted(edited[change.path].split()) == sorted(change.after.split()), change.path


@pytest.mark.parametrize("host", HOSTS)
def test_by_hand_names_what_edit_writes(host):
    """The names of the arguments of key-normalizers, which differ from host to host."""
    folder = HERE / "hosts" / host
    seam = next(seam for seam in detect_host(Checkout(folder)).seams if seam.name == "key-normalizers")
    edited = seam.edit(cst.parse_module((folder / seam.path).read_text())).code
    assert all(code in edited and code in seam.by_hand for code in seam.num_samples)
    assert seam.instructions().endswith(
        f"unless the file has it, also: from {seam.package} import loss_aggregation_adapter"
    )


def test_by_hand_as_the_message_says(tmp_path, capsys):
    """The host's own lines are refused, then skipped and written by hand, word for word; then the modes are exact."""
    folder = copy_host("two", tmp_path / "checkout")
    path = folder / "slime/backends/megatron_utils/loss.py"
    seam = next(seam for seam in detect_host(Checkout(folder)).seams if seam.name == "active-tokens")
    module = cst.parse_module(path.read_text())
    statement = module.code_for_node(seam.find(module)).strip()
    other = statement.replace("num_tokens = ", "num_tokens: object = ")
    assert other != statement
    path.write_text(path.read_text().replace(statement, other))
    assert main([str(folder), "--apply"]) == 2
    err = capsys.readouterr().err
    assert "there is no .miles-drop-in.json" not in err
    line = err.split("after num_tokens is counted: ")[1].split(";")[0]
    imported = err.split("unless the file has it, also: ")[1].splitlines()[0]
    text = path.read_text().replace(other, f"{other}\n    {line}")
    path.write_text(text.replace("\nimport torch\n", f"\nimport torch\n{imported}\n", 1))
    assert imported in path.read_text()
    assert main([str(folder), "--apply"]) == 2
    assert f"but traces in {path.relative_to(folder)}; nothing can be added" in capsys.readouterr().err
    log = folder / "slime/observability/train_metric_utils.py"
    log.write_text(log.read_text().replace("log_rollout_data", "log_rollouts"))
    assert main([str(folder), "--apply", "--skip", "active-tokens"]) == 2
    err = capsys.readouterr().err
    assert "to have all others written: --skip active-tokens,rollout-log;" in err
    assert "there is no .miles-drop-in.json" not in err
    log.write_text(log.read_text().replace("log_rollouts", "log_rollout_data"))
    assert main([str(folder), "--apply", "--skip", "active-tokens"]) == 0
    assert main([str(folder), "--check"]) == 0
    argv = [*STEP, "--loss-aggregation", "token_mean"]
    (result,) = run_host("two", folder, [{"argv": argv, "samples": SAMPLES, "backend": "megatron"}])
    check(result, [SAMPLES[:4], SAMPLES[4:]], "token_mean")
