"""What is read of a run's folder, whole, unfinished or damaged, and which runs are repetitions of one."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.loss_aggregation import MODES
from miles.tools.plot_run.runs import differing_arguments, group_runs, read_run, read_runs
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


def test_a_run_that_has_finished_its_last_step(tmp_path, caplog):
    assert len(read_run(write_run(tmp_path / "a", [step(0, 0.5)])).records) == 1
    assert not caplog.records


@pytest.mark.parametrize("tail", ['{"train/st', '{"train/step": 1, "rollout/st', "{", '{"train/step": 1,\udcff'])
def test_a_last_line_that_a_stopped_run_left_unfinished_is_left_out_with_a_warning(tmp_path, tail, caplog):
    directory = write_run(tmp_path / "a", [step(0, 0.5), step(1, 0.5)])
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(tail.encode(errors="surrogateescape"))
    assert [record["train/step"] for record in read_run(directory).records] == [0, 1]
    [record] = caplog.records
    expected = f"{directory / 'metrics.jsonl'} line 3 is not finished, as a run that was stopped leaves it; left out"
    assert record.getMessage() == expected


def test_a_last_line_that_only_lacks_its_end_counts(tmp_path, caplog):
    directory = write_run(tmp_path / "a", [step(0, 0.5)], tail=_lines(step(1, 0.75))[:-1])
    assert [record["train/step"] for record in read_run(directory).records] == [0, 1]
    assert not caplog.records


def test_of_a_step_that_was_done_again_the_later_line_counts(tmp_path):
    run = read_run(write_run(tmp_path / "a", [step(0, 0.1), step(1, 0.2), step(2, 0.3), step(1, 0.4)]))
    rewards = [(record["train/step"], record["rollout/raw_reward"]) for record in run.records]
    assert rewards == [(0, 0.1), (1, 0.4), (2, 0.3)]


@pytest.mark.parametrize(
    "line",
    [
        '{"x": ',
        "[1]",
        "7",
        '{"train/loss": 1}',
        '{"train/step": 1.0, "rollout/step": 1}',
        '{"train/step": true, "rollout/step": 1}',
        '{"train/step": -1, "rollout/step": 1}',
        '{"train/step": 1, "rollout/step": 1, "train/loss": "low"}',
        '{"train/step": 1, "rollout/step": 1, "train/loss": [1]}',
        f'{{"train/step": 1, "rollout/step": 1, "train/loss": 1{"0" * 400}}}',
        "[" * 100_000,
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_a_damaged_line_is_named(tmp_path, line, is_last):
    tail = f"{line}\n" if is_last else f"{line}\n{_lines(step(3, 0.5))}"
    directory = write_run(tmp_path / "a", [step(0, 0.5)], tail=tail)
    with pytest.raises(UserError) as found:
        read_run(directory)
    message = str(found.value)
    assert message.startswith(f"{directory / 'metrics.jsonl'} line 2 is damaged: expected a JSON object of numbers")
    assert line[:10] in message and len(message) - len(str(directory)) < 300 and "\n" not in message


@given(metrics=st.binary(max_size=80), arguments=st.binary(max_size=80), has_good_lines=st.booleans())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(metrics=b"", arguments=b'{"loss_aggregation": ["x"]}', has_good_lines=True)
@example(metrics=b"", arguments=b'{"loss_aggregation_divisor": "x"}', has_good_lines=True)
@example(metrics=b'{"train/step": 1e3', arguments=b"[" * 50_000, has_good_lines=True)
def test_any_bytes_give_runs_or_an_error_of_one_line(tmp_path, metrics, arguments, has_good_lines):
    good = _lines(step(0, 0.5), step(5, 0.25)).encode() if has_good_lines else b""
    (tmp_path / "metrics.jsonl").write_bytes(good + metrics)
    (tmp_path / "args.json").write_bytes(arguments)
    try:
        groups = group_runs(read_runs([tmp_path]))
    except UserError as error:
        assert "\n" not in str(error).removesuffix("\n")
    else:
        assert groups[0].runs[0].series("rollout/raw_reward")[0].size >= 1


@pytest.mark.parametrize("content", ["", "\n", "not JSON at all", b"\xff\xfe\x00"])
def test_runs_without_a_step_are_left_out_with_a_warning(tmp_path, caplog, content):
    full, empty = write_run(tmp_path / "full", [step(0, 0.5)]), write_run(tmp_path / "empty", [])
    (empty / "metrics.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert [run.directory for run in read_runs([empty, full])] == [full]
    assert f"{empty / 'metrics.jsonl'} has no step yet; the run is left out" in caplog.text


def test_empty_arguments_are_known_ones(tmp_path):
    directories = [write_run(tmp_path / name, [step(0, 0.5)]) for name in "ab"]
    (tmp_path / "a" / "args.json").write_text("{}")
    assert [len(group.runs) for group in group_runs(read_runs(directories))] == [1, 1]


def test_values_that_no_axis_can_show_are_holes(tmp_path):
    run = read_run(write_run(tmp_path / "a", [step(0, 1.7e308), step(1, -1.7e308), step(2, 0.5)]))
    np.testing.assert_array_equal(run.series("rollout/raw_reward")[1], [np.nan, np.nan, 0.5])


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


def test_a_run_without_arguments_is_named_after_its_folder_and_stands_alone(tmp_path, caplog):
    others = [write_run(tmp_path / f"known-{seed}", [step(0, 0.5)], seed=seed) for seed in (1, 2)]
    alone = write_run(tmp_path / "alone", [step(0, 0.5)])
    (alone / "args.json").unlink()
    groups = group_runs(read_runs([*others, alone]))
    assert [(group.label, group.mode, len(group.runs)) for group in groups] == [
        ("known-1, known-2", "sample_mean", 2),
        ("alone", None, 1),
    ]
    assert f"{alone / 'args.json'} is missing; the run is named after its folder" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "args.json is damaged: expected one JSON object, the run's arguments"),
        ("[1]", "args.json is damaged: expected one JSON object, the run's arguments"),
        ("[" * 100_000, "args.json is damaged: expected one JSON object, the run's arguments"),
        (
            '{"loss_aggregation": ["a"]}',
            "args.json is no run's: loss_aggregation must be a mode's name, got \"['a']\"",
        ),
        *(
            (
                f'{{"loss_aggregation_divisor": {value}}}',
                "args.json is no run's: loss_aggregation_divisor must be a positive number, got",
            )
            for value in ('"x"', "true", "0", "NaN", "1e999", "1" + "0" * 400)
        ),
    ],
)
def test_damaged_arguments(tmp_path, content, message):
    directory = write_run(tmp_path / "a", [step(0, 0.5)])
    (directory / "args.json").write_text(content)
    with pytest.raises(UserError) as found:
        read_run(directory)
    assert message in str(found.value) and str(found.value).endswith(
        "remove the file to name the run after its folder"
    )


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
