"""The page on metrics: every key that training logs is in it, and every key of it is logged by one of these runs."""

import re

import pytest
import torch

from miles.backends.training_utils.loss_hub.math_utils import compute_approx_kl, compute_policy_loss
from miles.rollout.debug_data import save_rollout_dump
from miles.trainer import main
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.backends.experimental.fsdp_utils.rollouts import make_samples
from tests.fast.docs.test_pages import DOCS
from tests.fast.tiny_runs import TINY, read_metrics

CORRECTED = ("--use-tis", "--tis-type", "icepop")
RUNS = {
    "policy": (),
    "SFT": ("--loss-type", "sft_loss"),
    "rollout's log-probs": ("--use-rollout-logprobs",),
    "KL": ("--use-kl-loss", "--kl-loss-coef", "0.1"),
    "mismatch": ("--get-mismatch-metrics",),
    "rejecting": CORRECTED,
    # Nothing is left, since pi_train / pi_rollout is near 1.
    "skipped": (*CORRECTED, "--tis-clip", "0.5", "--loss-aggregation", "token_mean", "--entropy-coef", "0"),
    "dump": ("--load-debug-rollout-data", "{dump}"),
    "weighted": ("--load-debug-rollout-data", "{weighted}", "--loss-weight-normalization", "tokens"),
}
OF_POLICY = RUNS.keys() - {"SFT"}
OF_TWO_ENGINES = OF_POLICY - {"rollout's log-probs"}
HOLDS_IN = {
    "always": RUNS.keys(),
    "policy and SFT losses": RUNS.keys(),
    "every sample has a `group_index`": RUNS.keys(),
    "policy loss": OF_POLICY,
    "the rollout has log-probs": OF_POLICY,
    "the rollout has log-probs; not with `--use-rollout-logprobs` alone": OF_TWO_ENGINES,
    "the trainer computes it: not for SFT, nor with `--use-rollout-logprobs` alone": OF_TWO_ENGINES,
    "`--use-kl-loss`": {"KL"},
    "`--use-tis` or `--get-mismatch-metrics`": {"mismatch", "rejecting", "skipped"},
    "a built-in correction or its metrics": {"mismatch", "rejecting", "skipped"},
    "as `train/tis`": {"mismatch", "rejecting", "skipped"},
    "`token_mean`, and nothing was left to take a mean of": {"skipped"},
    "every sample has it": {"dump"},
}
"""The runs in which each condition of the page holds."""


def documented(section=None):
    """Return the condition of each key in the page's tables, or in those of one section."""
    parts = re.split("^## ", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE)
    found = {}
    for part in parts:
        for line in re.findall(r"^\| `(?:train|rollout|perf)/.*$", part, re.MULTILINE):
            key, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4 and key not in found
            if section is None or part.startswith(section):
                found[key.strip("`")] = cells[-1]
    return found


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The metrics of each run, by its name."""
    root = tmp_path_factory.mktemp("runs")
    samples = make_samples(0, num_prompts=2)
    for sample in samples:
        sample.metadata = {"round_number": 1 + sample.index, "raw_reward": 7.5}
    dumps = {name: str(root / f"{name}.pt") for name in ("dump", "weighted")}
    save_rollout_dump(dumps["dump"], 0, samples)
    for sample in samples:
        sample.metadata, sample.loss_mask = {}, [1] * sample.response_length
        sample.loss_weights = [0.0] + [0.5] * (sample.response_length - 1)
    save_rollout_dump(dumps["weighted"], 0, samples)

    def run_all():
        for name, options in RUNS.items():
            options = [option.format(**dumps) for option in options]
            assert main([*TINY, "--num-rollout", "1", "--output-dir", str(root / name), *options]) == 0

    run_ranks(run_all, 1)
    return {name: read_metrics(root / name) for name in RUNS}


def test_each_condition_is_one_that_a_run_meets():
    assert set(documented().values()) == HOLDS_IN.keys()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_logs_what_the_page_says(name, logged):
    expected = {key for key, condition in documented().items() if name in HOLDS_IN[condition]}
    if name == "skipped":
        expected = {key for key in expected if not key.startswith("train/") or key in documented("The step's data")}
    assert logged[name]
    for line in logged[name]:
        assert line.keys() == expected


def formula(key):
    """Return what the page says of a key."""
    [row] = re.findall(rf"^\| `{key}` \| (.*?) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    return row


def test_a_reward_in_the_metadata_is_the_raw_one(logged):
    assert 'Sample.metadata["raw_reward"]' in formula("rollout/raw_reward")
    assert {line["rollout/raw_reward"] for line in logged["dump"]} == {7.5}


def test_the_share_of_clipped_tokens_leaves_out_the_dual_clip():
    """Ratios e^2 and e, above 1 + 0.2: only the positive advantage is clipped, and a cap of 3 holds the negative."""
    assert "what `--eps-clip-c` caps is not counted" in formula("train/pg_clipfrac")
    loss, clipped = compute_policy_loss(torch.tensor([-2.0, -1.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2, 3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2]) and clipped.tolist() == [0, 1]


def test_the_unbiased_kl_is_the_estimate_times_the_ratio():
    """log pi 0.5, log pi_ref 0: k1 is 0.5, and 1.0 with a ratio of 2."""
    assert "with `--use-unbiased-kl` times pi / pi_old of the token" in formula("train/kl_loss")
    half, zero, two = (torch.tensor([value]) for value in (0.5, 0.0, 2.0))
    assert compute_approx_kl(half, zero, "k1", importance_ratio=two).item() == 1.0


def test_tokens_of_weight_zero_are_counted_and_not_kept(logged):
    """Each answer's first token has weight 0 and is active."""
    assert "whose loss weight is not 0" in formula("train/num_kept_tokens")
    assert "tokens of weight 0 are in it with `--loss-weight-normalization tokens`" in formula(
        "train/num_counted_tokens"
    )
    for line in logged["weighted"]:
        assert line["train/num_counted_tokens"] == line["train/num_tokens"]
        assert line["train/num_kept_tokens"] == line["train/num_tokens"] - line["train/num_samples"]
