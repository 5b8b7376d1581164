"""The page on metrics: every key that training logs is in it, and every key of it is logged by one of these runs."""

import re

import pytest

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
    "a correction that may reject, loss weights, or a reducer with `context`": {"rejecting", "skipped"},
    "as `train/num_kept_tokens`": {"rejecting", "skipped"},
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
        sample.metadata = {"round_number": 1 + sample.index}
    dump = root / "dump.pt"
    save_rollout_dump(str(dump), 0, samples)

    def run_all():
        for name, options in RUNS.items():
            options = [option.replace("{dump}", str(dump)) for option in options]
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
