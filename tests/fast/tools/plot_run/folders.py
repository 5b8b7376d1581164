"""Folders as training leaves them, for the tests of `plot_run`."""

import json

ARGUMENTS = {
    "loss_aggregation": "sample_mean",
    "loss_aggregation_divisor": None,
    "calculate_per_token_loss": False,
    "lr": 0.002,
    "seed": 1,
    "rollout_seed": 1,
}
KEYS = ("rollout/raw_reward", "rollout/response_lengths", "train/loss", "train/grad_norm")


def step(number, *values, **more):
    """A line of metrics: reward, response length, loss and gradient norm, as many as are given."""
    metrics = dict(zip(KEYS, values, strict=False))
    return {"train/step": number, "rollout/step": number, **metrics, **more}


def write_run(directory, records, *, tail="", **arguments):
    """Write a run's folder; `tail` follows the last whole line of the metrics."""
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records) + tail)
    (directory / "args.json").write_text(json.dumps({**ARGUMENTS, "output_dir": str(directory), **arguments}))
    return directory
