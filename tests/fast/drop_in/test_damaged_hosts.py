"""Every seam of the small hosts, missing, renamed, there twice or changed already: it is named, nothing is written."""

from collections.abc import Callable
from dataclasses import replace

import libcst as cst
import libcst.matchers as m
import pytest

from miles.drop_in import edits
from miles.drop_in.__main__ import main
from miles.drop_in.checkout import Checkout
from miles.drop_in.hosts import detect_host
from miles.drop_in.plan import SeamsError, make_plan
from miles.drop_in.seam import Seam
from tests.fast.drop_in.small_hosts import HERE, HOSTS, copy_host
from tests.fast.drop_in.toy import snapshot

HOST_FOLDERS = {name: HERE / "hosts" / name for name in HOSTS}
SEAMS = [(name, seam) for name, folder in HOST_FOLDERS.items() for seam in detect_host(Checkout(folder)).seams]
each_seam = pytest.mark.parametrize(("host", "seam"), SEAMS, ids=[f"{host}-{seam.name}" for host, seam in SEAMS])


def statement_of(module: cst.Module, node: cst.CSTNode) -> cst.CSTNode:
    """Return the innermost statement that holds the node."""
    kinds = m.SimpleStatementLine() | m.If() | m.For() | m.FunctionDef()
    holding = [each for each in m.findall(module, kinds) if edits.contains(each, node)]
    return min(holding, key=lambda each: len(module.code_for_node(each)))


def without(seam: Seam, module: cst.Module) -> cst.Module:
    """Take the seam's statement out."""
    return module.deep_replace(statement_of(module, seam.find(module)), cst.parse_statement("pass\n"))


class Renaming(cst.CSTTransformer):
    """Gives every name, and every string, another."""

    def leave_Name(self, original_node, updated_node):
        return updated_node.with_changes(value=f"other_{updated_node.value}")

    def leave_SimpleString(self, original_node, updated_node):
        return updated_node.with_changes(value=f'"other {updated_node.raw_value}"')


def renamed(seam: Seam, module: cst.Module) -> cst.Module:
    """Rename everything in the seam's statement."""
    statement = statement_of(module, seam.find(module))
    return module.deep_replace(statement, statement.visit(Renaming()))


def twice(seam: Seam, module: cst.Module) -> cst.Module:
    """Have the seam's statement twice."""
    statement = statement_of(module, seam.find(module))
    return module.deep_replace(statement, cst.FlattenSentinel([statement, statement.deep_clone()]))


def changed(seam: Seam, module: cst.Module) -> cst.Module:
    """Have the edit there already."""
    return seam.edit(module)


def damaged(host: str, seam: Seam, damage: Callable[[Seam, cst.Module], cst.Module]) -> dict[str, bytes]:
    """Return the seam's file, damaged."""
    text = (HOST_FOLDERS[host] / seam.path).read_text()
    code = damage(seam, cst.parse_module(text)).code
    assert code != text
    return {seam.path: code.encode()}


@each_seam
@pytest.mark.parametrize("damage", [without, renamed, twice, changed], ids=lambda damage: damage.__name__)
def test_a_damaged_seam_is_named(host, seam, damage):
    view = Checkout(HOST_FOLDERS[host]).seen_with(damaged(host, seam, damage))
    known = detect_host(view)
    same_file = replace(known, seams=tuple(each for each in known.seams if each.path == seam.path))
    with pytest.raises(SeamsError, match="seams cannot be edited, so nothing is:") as error:
        make_plan(same_file, view)
    (mine,) = [each for each in error.value.errors if each.seam == seam.name]
    assert (mine.path, mine.looked_for, mine.by_hand) == (seam.path, seam.looked_for, seam.instructions())
    expected = {
        "without": "there is no ",
        "renamed": "there is no ",
        "twice": "there are 2 of: ",
        "changed": "it has been changed already: ",
    }
    assert mine.reason.startswith(expected[damage.__name__])


@pytest.mark.parametrize("host", HOSTS)
def test_apply_writes_nothing_and_says_what_to_do(host, tmp_path, capsys):
    folder = copy_host(host, tmp_path / "checkout")
    seam = detect_host(Checkout(folder)).seams[-1]
    for path, data in damaged(host, seam, without).items():
        (folder / path).write_bytes(data)
    before = snapshot(folder)
    assert main([str(folder), "--apply"]) == 2
    assert snapshot(folder) == before
    err = capsys.readouterr().err
    assert f"seam '{seam.name}' of {seam.path}: there is no " in err
    assert f"it looked for: {seam.looked_for}" in err
    assert f"to do it by hand: {seam.instructions()}" in err
    assert f"to have all others written: --skip {seam.name}; what is skipped is left to you" in err
    assert main([str(folder), "--check"]) == 1


@pytest.mark.parametrize("host", HOSTS)
def test_a_missing_file_is_named_by_all_of_its_seams(host):
    seams = detect_host(Checkout(HOST_FOLDERS[host])).seams
    path = seams[-1].path
    view = Checkout(HOST_FOLDERS[host]).seen_with({path: None})
    with pytest.raises(SeamsError) as error:
        make_plan(detect_host(view), view)
    expected = [(seam.name, "there is no such file") for seam in seams if seam.path == path]
    assert [(each.seam, each.reason) for each in error.value.errors] == expected


@pytest.mark.parametrize("host", HOSTS)
def test_seams_have_names_and_words_of_their_own(host):
    seams = detect_host(Checkout(HOST_FOLDERS[host])).seams
    assert len({seam.name for seam in seams}) == len(seams)
    for seam in seams:
        assert seam.name == seam.name.lower() and " " not in seam.name
        for text in (seam.purpose, seam.looked_for, seam.by_hand):
            assert text and "\n" not in text


@pytest.mark.parametrize("host", HOSTS)
def test_files_with_other_line_endings_get_the_same_edits(host, tmp_path, applied):
    """With a byte-order mark, too; `test_apply` has them one by one."""
    folder = copy_host(host, tmp_path / "checkout")
    for path in folder.rglob("*.py"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(folder)
    assert main([str(folder), "--apply"]) == 0
    after = snapshot(folder)
    for path, (mode, data) in snapshot(applied[host]).items():
        if path.endswith(".py"):
            is_new = path not in before
            assert after[path] == (mode, data if is_new else b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")), path
    assert main([str(folder), "--check"]) == 0
    assert main([str(folder), "--revert"]) == 0
    assert snapshot(folder) == before


@pytest.mark.parametrize("host", HOSTS)
def test_apply_and_revert_twice_are_once(host, tmp_path):
    folder = copy_host(host, tmp_path / "checkout")
    before = snapshot(folder)
    assert main([str(folder), "--check"]) == 1
    assert main([str(folder), "--apply"]) == 0
    after = snapshot(folder)
    for options in (["--apply"], ["--check"], []):
        assert main([str(folder), *options]) == 0
        assert snapshot(folder) == after
    for _ in range(2):
        assert main([str(folder), "--revert"]) == 0
        assert snapshot(folder) == before


@each_seam
def test_each_edit_has_to_be_there_as_it_was_written(host, seam, applied):
    """Taking one edit away, by hand, is damage that --check and --revert both name."""
    folder = applied[host]
    path, before = folder / seam.path, (folder / seam.path).read_bytes()
    original = (HOST_FOLDERS[host] / seam.path).read_text()
    edit = set(seam.edit(cst.parse_module(original)).code.splitlines()) - set(original.splitlines())
    line = max((line for line in edit if line.encode() in before), key=len)
    path.write_bytes(before.replace(line.encode(), line.encode() + b"  # mine"))
    try:
        state = snapshot(folder)
        assert main([str(folder), "--check"]) == 2
        assert main([str(folder), "--revert", "--force"]) == 2
        assert snapshot(folder) == state
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    folders = {host: copy_host(host, tmp_path_factory.mktemp("applied") / host) for host in HOSTS}
    for folder in folders.values():
        assert main([str(folder), "--apply"]) == 0
    return folders


@pytest.mark.parametrize("host", HOSTS)
def test_lines_of_ones_own_beside_every_edit_survive_a_revert(host, tmp_path):
    """A comment above each function and at both ends of each file, put in while the drop-in is in."""
    folder, plain = copy_host(host, tmp_path / "checkout"), copy_host(host, tmp_path / "plain")
    assert main([str(folder), "--apply"]) == 0
    for root in (folder, plain):
        for path in {seam.path for name, seam in SEAMS if name == host}:
            text = (root / path).read_text().replace("\ndef ", "\n# mine\ndef ")
            text = text.replace("\n    return", "\n    # mine\n    return")
            (root / path).write_text("# first\n" + text + "# last\n")
    assert main([str(folder), "--check"]) == 0
    assert main([str(folder), "--revert"]) == 0
    assert snapshot(folder) == snapshot(plain)


@pytest.mark.parametrize("name", ["--loss-aggregation", "--loss-aggregation-divisor"])
@pytest.mark.parametrize("declare", ["parser.add_argument", "reset_arg(parser, ", "group.add_argument"])
@pytest.mark.parametrize("host", HOSTS)
def test_an_option_of_that_name_of_the_hosts_own_is_refused(host, declare, name):
    """Argparse takes each name once; a second declaration would break the trainer's parser."""
    seam = next(seam for other, seam in SEAMS if (other, seam.name) == (host, "options"))
    text = (HOST_FOLDERS[host] / seam.path).read_text()
    call = f'{declare}"{name}")' if declare.endswith(", ") else f'{declare}("{name}", type=str)'
    view = Checkout(HOST_FOLDERS[host]).seen_with({seam.path: f"{text}\n\ndef more(parser):\n    {call}\n".encode()})
    with pytest.raises(SeamsError, match=f"the host has {name} of its own; rename it, or remove it, first") as error:
        make_plan(detect_host(view), view)
    assert [each.seam for each in error.value.errors] == ["options"]
