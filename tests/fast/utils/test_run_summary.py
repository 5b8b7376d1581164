"""The closing summary."""

from miles.utils.run_summary import describe_run
from miles.utils.tracking import MetricsLog


def _record(rollout_id, **values):
    return {"train/step": rollout_id, "rollout/step": rollout_id, **values}


def test_summary(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    for step in range(20):
        metrics.write(_record(step, **{"rollout/raw_reward": step / 10, "train/num_tokens": 100}))
    text = describe_run(
        metrics,
        num_rollouts=20,
        num_planned=30,
        seconds=61.25,
        checkpoint=tmp_path / "iter_0000020",
        trackers=["tensorboard: there", "wandb: elsewhere"],
    )
    assert text.splitlines() == [
        "stopped: 20 of 30 rollouts, 20 optimizer steps, 2,000 response tokens trained on, 61.2 s",
        # (0.0 + ... + 0.9) / 10 and (1.0 + ... + 1.9) / 10
        "reward: 0.450 over the first 10 steps, 1.450 over the last 10",
        f"metrics, arguments and log: {tmp_path}/{{metrics.jsonl,args.json,train.log}}",
        "tensorboard: there",
        "wandb: elsewhere",
        f"checkpoint: {tmp_path}/iter_0000020",
    ]
    finished = describe_run(metrics, num_rollouts=20, num_planned=20, seconds=1.0, checkpoint=None)
    assert finished.startswith("finished: 20 of 20 rollouts, ") and "checkpoint" not in finished
    resumed = describe_run(metrics, num_rollouts=20, num_planned=15, seconds=1.0, checkpoint=None)
    assert resumed.startswith("finished: 20 rollouts, more than --num-rollout 15, 20 optimizer steps, ")


def test_summary_does_not_count_skipped_steps(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    for step in range(5):
        tokens = {"train/num_tokens": 10}
        skipped = {"train/skipped_steps": step // 2} if step % 2 else {"train/loss": 0.5}
        metrics.write(_record(step, **skipped, **tokens))
    # Steps that carry the counter beside a loss were made.
    metrics.write(_record(5, **{"train/loss": float("nan"), "train/skipped_steps": 2, "train/num_tokens": 10}))
    text = describe_run(metrics, num_rollouts=6, num_planned=6, seconds=1.0, checkpoint=None)
    assert "4 optimizer steps (2 more skipped), 40 response tokens" in text


def test_summary_of_a_run_without_rewards(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", first_rollout_id=0)
    text = describe_run(metrics, num_rollouts=0, num_planned=1, seconds=0.0, checkpoint=None)
    assert "reward" not in text
