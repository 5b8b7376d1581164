"""What is read of a run's folder, whole, unfinished or damaged, and which runs are repetitions of one."""

import json
from pathlib import Path

import numpy as np
import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools.plot_run.runs import differing_arguments, group_runs, parse_metrics, read_run, read_runs
from miles.utils.arguments import parse_args
from miles.utils.errors import UserError
from miles.utils.run_files import write_arguments
from miles.utils.tracking import MetricsLog
from tests.fast.tools.plot_run.folders import step, write_run


def _lines(*records):
    return "".join(f"{json.dumps(record)}\n" for record in records)


def test_what_training_writes_is_read_back(tmp_path):
    args = parse_args(["--loss-aggregation", "constant", "--loss-aggregation-divisor", "16", "--seed", "3"])
    write_arguments(tmp_path, args)
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    metrics.write(step(0, 0.5, 7.0, 0.25, 2.0))
    metrics.write(step(1, 0.75, 6.0, float("nan"), float("inf")))
    metrics.close()
    [group] = group_runs(read_runs([tmp_path]))
    assert (group.label, group.mode) == (tmp_path.name, "constant")
    steps, losses = group.runs[0].series("train/loss")
    assert steps.tolist() == [0, 1]
    np.testing.assert_array_equal(losses, [0.25, np.nan])


def test_a_step_without_a_value_is_a_hole(tmp_path):
    # Step 1 was skipped and has no loss; that of step 2 was not finite.
    records = [step(0, 0.5, 7.0, 0.25), step(1, 0.5, 7.0, **{"train/skipped_steps": 1}), step(2, 0.5, 7.0, None)]
    steps, losses = read_run(write_run(tmp_path / "a", records)).series("train/loss")
    assert steps.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(losses, [0.25, np.nan, np.nan])


@pytest.mark.parametrize("tail", ["", '{"train/st', '{"train/step": 1, "rollout/st'])
def test_a_run_that_is_being_written(tmp_path, tail, caplog):
    run = read_run(write_run(tmp_path / "a", [step(0, 0.5)], tail=tail))
    assert [record["train/step"] for record in run.records] == [0]
    assert not caplog.records


def test_a_last_line_that_only_lacks_its_end_counts():
    records, num_damaged = parse_metrics(_lines(step(0, 0.5), step(1, 0.75))[:-1])
    assert ([record["train/step"] for record in records], num_damaged) == ([0, 1], 0)


def test_of_a_step_that_was_done_again_the_later_line_counts():
    records, num_damaged = parse_metrics(_lines(step(0, 0.1), step(1, 0.2), step(2, 0.3), step(1, 0.4)))
    assert [(record["train/step"], record["rollout/raw_reward"]) for record in records] == [
        (0, 0.1),
        (1, 0.4),
        (2, 0.3),
    ]
    assert num_damaged == 0


def test_damaged_lines_are_left_out_with_a_warning(tmp_path, caplog):
    directory = write_run(
        tmp_path / "a", [step(0, 0.5)], tail='{"x": \n[1]\n{"train/loss": 1}\n' + _lines(step(3, 0.5))
    )
    assert [record["train/step"] for record in read_run(directory).records] == [0, 3]
    assert f"{directory / 'metrics.jsonl'}: left out 3 damaged lines" in caplog.text


@pytest.mark.parametrize("content", ["", "\n", "not JSON at all\n", b"\xff\xfe\x00"])
def test_runs_without_a_step_are_left_out_with_a_warning(tmp_path, caplog, content):
    full, empty = write_run(tmp_path / "full", [step(0, 0.5)]), write_run(tmp_path / "empty", [])
    (empty / "metrics.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert [run.directory for run in read_runs([empty, full])] == [full]
    assert f"{empty / 'metrics.jsonl'} has no step yet; the run is left out" in caplog.text


def test_nothing_to_draw(tmp_path):
    empty = [write_run(tmp_path / name, []) for name in "ab"]
    with pytest.raises(UserError, match=r"nothing to draw: none of .*a, .*b has finished a step yet"):
        read_runs(empty)


def test_folders_that_are_no_runs(tmp_path):
    write_run(tmp_path / "runs" / "a", [step(0, 0.5)])
    with pytest.raises(
        UserError, match=r"runs has no metrics.jsonl; .* If it holds such folders, name these: .*runs/\*"
    ):
        read_runs([tmp_path / "runs"])
    with pytest.raises(UserError, match=r"absent is not a folder; expected one that train.py wrote \(--output-dir\)"):
        read_runs([tmp_path / "absent"])


def test_one_folder_under_two_names_is_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("q/a1"), [step(0, 0.5)])
    Path("link").symlink_to("q/a1")
    for one, other in (("q/a1", "q/../q/a1"), ("q/a1", "link"), ("q/a1", tmp_path / "q" / "a1")):
        with pytest.raises(
            UserError, match=rf"^each run is drawn once, got {one} and {other}, which are one folder; name it once$"
        ):
            read_runs([Path(one), Path(other)])
    with pytest.raises(UserError, match=r"^each run is drawn once, got q/a1 twice; name it once$"):
        read_runs([Path("q/a1")] * 2)


def test_metrics_that_cannot_be_read(tmp_path, monkeypatch):
    directory = write_run(tmp_path / "a", [step(0, 0.5)])

    def fail(path, **keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(directory), "read_text", fail)
    with pytest.raises(UserError, match=r"cannot read .*a/metrics.jsonl: Permission denied"):
        read_run(directory)


@pytest.mark.parametrize(("content", "state"), [(None, "missing"), ("{", "damaged"), ("[1]", "damaged")])
def test_a_run_without_arguments_is_named_after_its_folder_and_stands_alone(tmp_path, caplog, content, state):
    others = [write_run(tmp_path / f"known-{seed}", [step(0, 0.5)], seed=seed) for seed in (1, 2)]
    alone = write_run(tmp_path / "alone", [step(0, 0.5)])
    (alone / "args.json").unlink() if content is None else (alone / "args.json").write_text(content)
    groups = group_runs(read_runs([*others, alone]))
    assert [(group.label, group.mode, len(group.runs)) for group in groups] == [
        ("known-1, known-2", "sample_mean", 2),
        ("alone", None, 1),
    ]
    assert f"{alone / 'args.json'} is {state}; the run is named after its folder" in caplog.text


def test_the_four_modes_and_their_seeds(tmp_path):
    directories = []
    for mode in MODES:
        for seed in (1, 2, 3):
            law = {"loss_aggregation": mode, "calculate_per_token_loss": mode == "token_mean"}
            law["loss_aggregation_divisor"] = 16.0 if mode == "constant" else None
            files = {"save": f"checkpoints-{seed}", "wandb_run_id": f"{mode}-{seed}"}
            directories.append(
                write_run(tmp_path / f"{mode}-{seed}", [step(0, 0.5)], seed=seed, rollout_seed=seed, **law, **files)
            )
    groups = group_runs(read_runs(directories))
    assert [group.label for group in groups] == ["sample_mean", "prompt_mean", "token_mean", "constant, L = 16"]
    assert [group.mode for group in groups] == list(MODES)
    assert [[run.directory.name[-1] for run in group.runs] for group in groups] == [["1", "2", "3"]] * 4


def test_labels_tell_every_argument_that_differs_the_mode_first(tmp_path):
    directories = [
        write_run(tmp_path / "a", [step(0, 0.5)], clip_grad=1.0),
        write_run(tmp_path / "b", [step(0, 0.5)], clip_grad=0.5, loss_aggregation="token_mean"),
        write_run(tmp_path / "c", [step(0, 0.5)], clip_grad=0.5, max_tokens_per_gpu=64),
    ]
    runs = read_runs(directories)
    assert differing_arguments(runs) == ["loss_aggregation", "clip_grad", "max_tokens_per_gpu"]
    assert [group.label for group in group_runs(runs)] == [
        "sample_mean, clip_grad = 1.0, max_tokens_per_gpu = unset",
        "token_mean, clip_grad = 0.5, max_tokens_per_gpu = unset",
        "sample_mean, clip_grad = 0.5, max_tokens_per_gpu = 64",
    ]


def test_an_argument_that_older_runs_lack_is_unset(tmp_path):
    directories = [
        write_run(tmp_path / "new", [step(0, 0.5)], eps_clip_c=None, seed=1),
        write_run(tmp_path / "old", [step(0, 0.5)], seed=2),
    ]
    assert [len(group.runs) for group in group_runs(read_runs(directories))] == [2]


def test_a_setting_is_what_differs_within_a_mode(tmp_path):
    laws = [("sample_mean", None, 30), ("sample_mean", None, 40), ("constant", 16.0, 30), ("constant", 16.0, 40)]
    directories = [
        write_run(
            tmp_path / str(place),
            [step(0, 0.5)],
            loss_aggregation=mode,
            num_rollout=count,
            loss_aggregation_divisor=divisor,
        )
        for place, (mode, divisor, count) in enumerate(laws)
    ]
    assert [group.setting for group in group_runs(read_runs(directories))] == [("30",), ("40",), ("30",), ("40",)]
    # Alone in its mode, each has none: the divisor and the number of rollouts go with the mode.
    assert [group.setting for group in group_runs(read_runs([directories[0], directories[3]]))] == [(), ()]


def test_what_cannot_be_printed_is_escaped(tmp_path):
    directory = write_run(tmp_path / "a\nb\x1b[31m\udcff é", [step(0, 0.5)])
    assert [group.label for group in group_runs(read_runs([directory]))] == [r"a\nb\x1b[31m\udcff é"]
