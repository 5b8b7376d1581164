"""`metrics.jsonl`."""

import json
import resource

import pytest

from miles.trainer import main
from miles.utils.errors import UserError
from miles.utils.tracking import MetricsLog
from tests.fast.backends.experimental.fsdp_utils.ranks import run_forked
from tests.fast.tiny_runs import TINY


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


def test_the_next_step_follows_the_last_line_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert MetricsLog(path, first_rollout_id=0).next_step == 0
    lines = [{"train/step": step, "rollout/step": step // 2} for step in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert MetricsLog(path, first_rollout_id=2).next_step == 4
    assert MetricsLog(path, first_rollout_id=0).next_step == 0


def test_a_line_without_the_numbers_of_a_step_is_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train/step": 0, "rollout/step": 0}\n{"rollout/step": 0}\n{"train/step": 1}\n[]\n')
    assert MetricsLog(path, first_rollout_id=1).records == [_record(0)]


def test_a_full_disk_is_one_line(tmp_path):
    """A limit on the size of files stands in for it."""
    path = tmp_path / "run" / "metrics.jsonl"

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        return main([*TINY, "--output-dir", str(path.parent)])

    status, out, err = run_forked(run, tmp_path)
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    reason = "File too large; make room, or name another folder"
    assert (status, error) == (2, f"error: cannot write metrics to {path} (--output-dir): {reason}")
    assert "Traceback" not in err
    num_whole = path.read_text().count("\n")
    assert num_whole > 0 and f" {num_whole} optimizer steps, " in out


@pytest.mark.parametrize("step", ["true", str(2**70), "-1", "1.0", "[" * 100_000])
def test_a_line_whose_step_is_no_count_is_none(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"train/step": 0, "rollout/step": 0}}\n{{"train/step": {step}, "rollout/step": 0}}\n')
    assert MetricsLog(path, first_rollout_id=1).records == [_record(0)]
