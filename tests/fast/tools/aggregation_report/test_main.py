"""The command: what a person reads, its exit statuses, its files, and what it imports."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles.rollout.debug_data import save_rollout_dump
from miles.tools.aggregation_report.__main__ import main
from tests.fast.length_mix import mixed_samples
from tests.fast.tools.aggregation_report.small_dumps import GLOBAL_BATCH_SIZE, write_dumps
from tests.fast.tools.plot_run.folders import step, write_run

REPOSITORY = Path(__file__).parents[4]

DATA = """\
rollouts                  rollouts_0.pt and 1 more, 3 optimizer steps
samples                   11 (12 rows: 10 completed, 2 truncated)
active tokens             45 of 58 response tokens
fully masked samples      1
right, wrong              5, 6 (right: reward 1; wrong: 0)
prompt groups             5 of 3 samples, the most frequent size
  incomplete              3 smaller
  with one reward         2 (3 samples): no signal where rewards are normalized in their group
constant                  L = 16 tokens
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(REPOSITORY)},
    )


def test_from_a_shell(tmp_path):
    save_rollout_dump(f"{tmp_path}/a.pt", 0, mixed_samples(16))
    done = run(tmp_path, "-m", "miles.tools.aggregation_report", "a.pt", "--json", "b.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rollouts                  a.pt, 1 optimizer step\n")
    assert json.loads((tmp_path / "b.json").read_text())["data"]["samples"] == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.json"]
    failed = run(tmp_path, "-m", "miles.tools.aggregation_report", "c.pt")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "error: cannot read rollout data c.pt: No such file or directory\n"


@pytest.mark.parametrize("options", [["--help"], ["a.pt", "--divisor=-1"], ["a.pt", "--json=no/a.json"]])
def test_help_and_bad_options_import_no_torch(tmp_path, options):
    code = (
        "import sys; from miles.tools.aggregation_report.__main__ import main\n"
        f"try: main({options})\n"
        "finally: print(sorted({'torch', 'matplotlib', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = run(tmp_path, "-c", code)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_unknown_options_and_abbreviations(capsys):
    for options in ([], ["a.pt", "--div=3"], ["a.pt", "--loss-aggregation=constant"]):
        with pytest.raises(SystemExit) as stopped:
            main(options)
        assert stopped.value.code == 2
    assert "unrecognized arguments: --loss-aggregation=constant" in capsys.readouterr().err


def test_what_the_table_says_of_the_data(tmp_path, capsys):
    paths = write_dumps(tmp_path)
    assert main([*paths, f"--global-batch-size={GLOBAL_BATCH_SIZE}", "--prompt-groups=ragged", "--divisor=16"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(DATA) and err == ""


@pytest.mark.parametrize("options", [[], ["--global-batch-size=4"], ["--divisor=1e9"], ["--top=300"]])
def test_the_table_fits_a_terminal_and_shows_what_the_json_holds(tmp_path, capsys, options):
    path = str(save_rollout_dump(f"{tmp_path}/a.pt", 0, mixed_samples(64, longest=12_000)))
    assert main([path, *options, f"--json={tmp_path}/b.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(line.endswith(" ") or "None" in line or "nan" in line for line in lines)
    report = json.loads((tmp_path / "b.json").read_text())
    for name in ("effective_samples", "effective_prompts"):
        shown = [f"{mode[name]:,.1f}" for mode in report["modes"].values()]
        assert any(line.split()[-4:] == shown for line in lines), shown
    longest = [f"{100 * mode['share_by_quarter'][3]:.2f}" for mode in report["modes"].values()]
    assert any(line.split()[-8::2] == longest for line in lines if line.startswith("  longest,"))


def test_columns_stay_apart_whatever_the_group_is_called(tmp_path, capsys):
    samples = mixed_samples(8)
    for sample in samples:
        sample.group_index += 10**14
    assert main([str(save_rollout_dump(f"{tmp_path}/a.pt", 0, samples))]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  1. "))
    assert [word for word in line.split() if word.endswith(":")] == ["100000000000000:"] * 4


def test_threads_and_garbage_collection_are_as_before(tmp_path):
    path = write_dumps(tmp_path)[1]
    try:
        for num_threads, is_enabled in ((2, False), (1, True)):
            torch.set_num_threads(num_threads)
            (gc.enable if is_enabled else gc.disable)()
            assert main([path]) == 0 and main([f"{tmp_path}/none.pt"]) == 2
            assert (torch.get_num_threads(), gc.isenabled()) == (num_threads, is_enabled)
    finally:
        torch.set_num_threads(1)
        gc.enable()


def test_ctrl_c(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("miles.tools.aggregation_report.dumps.read_dump_rows", stop)
    assert main([f"{tmp_path}/a.pt"]) == 130


def test_a_json_file_that_cannot_be_written_keeps_the_old_one(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    path = tmp_path / "b.json"
    path.write_text("old")
    assert main([*write_dumps_without_replace(tmp_path), f"--json={path}"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: --json {path} cannot be written: No space left on device; name another file\n"
    )
    assert path.read_text() == "old" and not list(tmp_path.glob(".*"))


def write_dumps_without_replace(folder: Path) -> list[str]:
    rows = [sample.to_dict() for sample in mixed_samples(2)]
    torch.save({"samples": rows}, folder / "a.pt")
    return [str(folder / "a.pt")]


@pytest.mark.parametrize(
    ("tool", "missing", "command"),
    [
        ("aggregation_report", "torch", "pip install -e ."),
        ("aggregation_report", "matplotlib", 'pip install -e ".[plot]"'),
        ("plot_run", "numpy", 'pip install -e ".[plot]"'),
        ("plot_run", "matplotlib", 'pip install -e ".[plot]"'),
    ],
)
def test_a_package_that_is_not_installed_is_one_line(tool, missing, command, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    write_run(tmp_path / "run", [step(0, 0.5)])
    save_rollout_dump(f"{tmp_path}/a.pt", 0, mixed_samples(16))
    arguments = {"aggregation_report": ["--plot", "a.png", "a.pt"], "plot_run": ["run"]}[tool]
    code = (
        f"import sys, runpy; sys.modules[{missing!r}] = None; sys.argv[1:] = {arguments!r}; "
        f"runpy.run_module('miles.tools.{tool}', run_name='__main__')"
    )
    done = run(tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.endswith(f"in this project's folder: {command}\n")
    assert done.stderr.count("\n") == 1
