"""The code in the documentation runs, through the hooks that it is written for."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils.loss_hub.custom_reducer import load_pg_loss_reducer
from miles.trainer import main
from tests.fast.backends.experimental.fsdp_utils.ranks import run_forked

ROOT = Path(__file__).parents[3]
TINY = ["--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--hidden-size", "8"]
TINY += ["--num-attention-heads", "2", "--num-layers", "1"]


def python_files(page: str) -> dict[str, str]:
    """Return the page's Python blocks by the file name in their first line."""
    blocks = re.findall(r"```python\n# (\S+\.py)[^\n]*\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return dict(blocks)


@pytest.fixture(autouse=True)
def documented_modules(tmp_path, monkeypatch):
    for page in ("README.md", "docs/customization.md"):
        prefix = Path(page).stem.lower()
        for name, code in python_files(page).items():
            (tmp_path / f"{prefix}_{name}").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        # Two rows of 3 and 2 tokens, the second one's last masked; values 1, 2, 3 and 4, 100.
        ("readme_my_reducers.per_thousand", (1 + 2 + 3 + 4) / 1000),
        ("customization_my_reducers.sqrt_length", (1 + 2 + 3) / 3**0.5 + 4 / 1**0.5),
    ],
)
def test_documented_reducers(path, expected):
    args = Namespace(custom_pg_loss_reducer_function_path=path, calculate_per_token_loss=False)
    reducer = load_pg_loss_reducer(args, [4, 3], [3, 2], [torch.ones(3), torch.tensor([1.0, 0.0])])
    assert reducer(torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])).item() == pytest.approx(expected)
    blank = load_pg_loss_reducer(args, [0], [0], [torch.zeros(0, dtype=torch.int64)])
    assert blank(torch.zeros(0)).item() == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--custom-pg-loss-reducer-function-path", "readme_my_reducers.per_thousand"],
        ["--custom-pg-loss-reducer-function-path", "customization_my_reducers.sqrt_length"],
        ["--custom-pg-loss-reducer-function-path", "customization_my_step_reducers.vl_norm"],
        ["--use-tis", "--custom-tis-function-path", "customization_my_corrections.drop_unlikely"],
        ["--custom-rm-path", "customization_my_rewards.shortest"],
        ["--custom-reward-post-process-path", "customization_my_normalization.minus_half"],
        ["--loss-type", "custom_loss", "--custom-loss-function-path", "customization_my_losses.focal"],
        ["--rollout-function-path", "customization_my_rollouts.without_last_token"],
    ],
    ids=lambda options: options[-1].rpartition(".")[2],
)
def test_documented_hooks_train(options, tmp_path):
    (tmp_path / "run.yaml").write_text("lowest_ratio: 0.1\n")
    run = ["--custom-config-path", "run.yaml", "--output-dir", str(tmp_path / "run")]
    status, _, errors = run_forked(lambda: main([*TINY, *options, *run]), tmp_path)
    assert status == 0, errors
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


def test_no_documented_hook_is_left_out():
    names = set(re.findall(r"^def (\w+)", "".join(python_files("docs/customization.md").values()), flags=re.MULTILINE))
    assert names == {
        "sqrt_length",
        "vl_norm",
        "drop_unlikely",
        "shortest",
        "minus_half",
        "focal",
        "without_last_token",
    }
