"""The drop-in without its record: every command says so, and how to recover; and what is no trace of it."""

import pytest

from miles.drop_in.__main__ import main
from miles.drop_in.checkout import Checkout
from miles.drop_in.hosts import detect_host
from miles.drop_in.record import RECORD_PATH
from miles.drop_in.traces import find_traces
from tests.fast.drop_in.small_hosts import HOSTS, copy_host
from tests.fast.drop_in.toy import commit_all, git, snapshot

EDITED = {"one": "miles/backends/training_utils/loss.py", "two": "slime/backends/megatron_utils/loss.py"}
ADDED = {"one": "miles/backends/training_utils", "two": "slime/utils"}


@pytest.fixture(params=HOSTS)
def host(request):
    return request.param


@pytest.fixture
def checkout(host, tmp_path):
    folder = copy_host(host, tmp_path / "checkout")
    commit_all(folder)
    return folder


@pytest.mark.parametrize("option", [[], ["--apply"], ["--revert"], ["--check"]])
def test_toy_without_its_record(toy, drop_in, capsys, option):
    drop_in(toy, "--apply")
    (toy / RECORD_PATH).unlink()
    before = snapshot(toy)
    capsys.readouterr()
    assert drop_in(toy, *option) == 2
    assert snapshot(toy) == before
    out, err = capsys.readouterr()
    words = out if option == ["--check"] else err
    assert words.startswith(f"the drop-in in {toy} is in part: " if out else "error: ")
    assert "there is no .miles-drop-in.json, but traces in toy/loss/inner/loss_aggregation.py; nothing can be" in words
    assert "put the record back: git restore .miles-drop-in.json, or from the commit that has it: git" in words
    assert "git restore toy/options.py toy/step.py, or from the commit before it: git checkout COMMIT --" in words
    assert "and delete toy/loss/inner/loss_aggregation.py, or move away what is your own there" in words


@pytest.mark.parametrize("option", [[], ["--apply"], ["--revert"], ["--check"]])
def test_without_record_and_new_files(host, checkout, capsys, option):
    assert main([str(checkout), "--apply"]) == 0
    for path in (RECORD_PATH, *(f"{ADDED[host]}/loss_aggregation{end}.py" for end in ("", "_adapter"))):
        (checkout / path).unlink()
    before = snapshot(checkout)
    capsys.readouterr()
    assert main([str(checkout), *option]) == 2
    assert snapshot(checkout) == before
    words = "".join(capsys.readouterr())
    assert f"there is no {RECORD_PATH}, but traces in " in words
    assert EDITED[host] in words.split("traces in ")[1].split(";")[0]
    assert "lines that you wrote by hand, for --skip, are yours to take out, or name their seams with --skip" in words


def test_what_it_says_recovers(checkout, capsys):
    before = snapshot(checkout)
    main([str(checkout), "--apply"])
    (checkout / RECORD_PATH).unlink()
    capsys.readouterr()
    main([str(checkout), "--check"])
    words = capsys.readouterr().out
    files = words.split("with git: git restore ")[1].split(",")[0].split()
    added = words.split("and delete ")[1].split(", or move")[0].split()
    git(checkout, "restore", *files)
    for path in added:
        (checkout / path).unlink()
    assert snapshot(checkout) == before
    assert main([str(checkout), "--check"]) == 1


@pytest.mark.parametrize(
    ("line", "is_trace"),
    [
        ("# TODO loss_aggregation", False),
        ("# not loss_aggregation_adapter.sums_tokens(args)", False),
        ("x = args.loss_aggregation", False),
        ("x = my_loss_aggregation_adapter_of_mine", False),
        ("from slime.utils import loss_aggregation_adapter", True),
        ("    x = loss_aggregation_adapter.sums_tokens(args)  # mine", True),
    ],
)
def test_what_a_trace_is(host, checkout, line, is_trace):
    text = (checkout / EDITED[host]).read_text()
    view = Checkout(checkout).seen_with({EDITED[host]: f"{text}\n{line}\n".encode()})
    assert find_traces(view, detect_host(view)) == ([EDITED[host]] if is_trace else [])


def test_a_comment_does_not_count(host, checkout):
    path = checkout / EDITED[host]
    path.write_text(path.read_text() + "# TODO loss_aggregation\n")
    for option, status in (("--check", 1), ("--revert", 0)):
        assert main([str(checkout), option]) == status
