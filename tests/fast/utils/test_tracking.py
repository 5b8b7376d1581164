"""The run's folder, metrics and summary."""

import json
import logging
import time
from argparse import Namespace

import pytest

from miles.utils.errors import UserError
from miles.utils.tracking import (
    MetricsLog,
    console_logging,
    describe_run,
    file_logging,
    make_output_dir,
    write_arguments,
)


def _record(rollout_id, **values):
    return {"train/step": rollout_id, "rollout/step": rollout_id, **values}


def test_each_step_is_on_disk_at_once_and_json_is_strict(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    metrics.write({**_record(0), "train/loss": 0.5, "a": float("nan"), "b": float("-inf")})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {**_record(0), "train/loss": 0.5, "a": None, "b": None}


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    before = "".join(json.dumps(_record(step)) + "\n" for step in (0, 1, 2, 3)) + '{"train/step": 4, "ro'
    path.write_text(before)
    metrics = MetricsLog(path, first_rollout_id=2)
    assert metrics.records == [_record(0), _record(1)]
    assert "dropped 3 lines from rollout 2 on" in caplog.text
    metrics.write(_record(2))
    metrics.close()
    assert [json.loads(line)["train/step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.1.jsonl", "metrics.jsonl"]
    assert (tmp_path / "metrics.1.jsonl").read_text() == before


def test_metrics_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"cannot write metrics to .*absent/metrics.jsonl \(--output-dir\)"):
        MetricsLog(tmp_path / "absent" / "metrics.jsonl", first_rollout_id=0)


def test_default_folders_are_new_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = Namespace(output_dir=None, loss_aggregation="prompt_mean")
    now = time.mktime((2031, 2, 3, 4, 5, 6, 0, 0, -1))
    names = [str(make_output_dir(args, now=now)) for _ in range(3)]
    stem = "runs/20310203-040506-prompt_mean"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]


def test_a_named_folder_is_used_again(tmp_path):
    args = Namespace(output_dir=str(tmp_path / "a" / "b"), loss_aggregation="constant")
    assert make_output_dir(args, now=0.0) == make_output_dir(args, now=1.0) == tmp_path / "a" / "b"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the output folder"):
        make_output_dir(Namespace(output_dir=str(tmp_path / "file" / "b")), now=0.0)


def test_arguments_are_sorted_json(tmp_path):
    write_arguments(tmp_path, Namespace(lr=0.5, betas=(1, 2), anything=Namespace()))
    text = (tmp_path / "args.json").read_text()
    assert list(json.loads(text)) == ["anything", "betas", "lr"]
    assert json.loads(text)["lr"] == 0.5


def test_summary(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    for step in range(20):
        metrics.write(_record(step, **{"rollout/raw_reward": step / 10, "train/num_tokens": 100}))
    text = describe_run(metrics, num_rollouts=20, num_planned=30, seconds=61.25, checkpoint=tmp_path / "iter_0000020")
    assert text.splitlines() == [
        "stopped: 20 of 30 rollouts, 20 optimizer steps, 2,000 response tokens trained on, 61.2 s",
        # (0.0 + ... + 0.9) / 10 and (1.0 + ... + 1.9) / 10
        "reward: 0.450 over the first 10 steps, 1.450 over the last 10",
        f"metrics, arguments and log: {tmp_path}/{{metrics.jsonl,args.json,train.log}}",
        f"checkpoint: {tmp_path}/iter_0000020",
    ]
    finished = describe_run(metrics, num_rollouts=20, num_planned=20, seconds=1.0, checkpoint=None)
    assert finished.startswith("finished: 20 of 20") and "checkpoint" not in finished


def test_summary_does_not_count_skipped_steps(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    for step in range(5):
        skipped = {"train/skipped_steps": step // 2} if step % 2 else {"train/loss": 0.5, "train/num_tokens": 10}
        metrics.write(_record(step, **skipped))
    # Steps that carry the counter beside a loss were made.
    metrics.write(_record(5, **{"train/loss": float("nan"), "train/skipped_steps": 2, "train/num_tokens": 10}))
    text = describe_run(metrics, num_rollouts=6, num_planned=6, seconds=1.0, checkpoint=None)
    assert "4 optimizer steps (2 more skipped), 40 response tokens" in text


def test_summary_of_a_run_without_rewards(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    text = describe_run(metrics, num_rollouts=0, num_planned=1, seconds=0.0, checkpoint=None)
    assert "reward" not in text


def test_only_the_main_process_talks_and_the_log_is_kept(tmp_path, capsys):
    logger = logging.getLogger("miles.somewhere")
    with console_logging(is_main=False):
        logger.info("from a helper")
        logger.warning("a warning")
    with console_logging(is_main=True), file_logging(tmp_path / "train.log"):
        logger.info("from the main process")
    logger.info("after the run")
    shown = capsys.readouterr().err
    assert "from the main process" in shown and "a warning" in shown
    assert "from a helper" not in shown and "after the run" not in shown
    assert "INFO miles.somewhere: from the main process" in (tmp_path / "train.log").read_text()
