"""The page on the four modes: its commands are ones that train, its program runs, its central claim holds."""

import json
import re
import runpy
import shlex
import sys
from functools import partial

import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.trainer import main
from miles.utils.arguments import parse_args
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks
from tests.fast.docs.test_customization import ROOT, python_files
from tests.fast.tools.plot_run.folders import step, write_run

PAGE = "docs/four-modes.md"


def _training_options(mode, seed):
    """The page's options of one run, as the shell would expand them."""
    page = (ROOT / PAGE).read_text().replace("\\\n", " ")
    options = re.search(r"for mode in .*?python train\.py (.*?)\n", page, flags=re.DOTALL)[1]
    divisor = re.search(r"\$\(\[ \$mode = constant \] && echo (.*?)\)", options)
    options = options.replace(divisor[0], divisor[1] if mode == "constant" else "")
    return shlex.split(options.replace("$mode", mode).replace("$seed", str(seed)))


@pytest.mark.parametrize("mode", MODES)
def test_the_command_trains_each_mode(mode):
    args = parse_args(_training_options(mode, 3))
    assert (args.loss_aggregation, args.seed, args.rollout_seed) == (mode, 3, 3)
    assert args.output_dir == f"runs/four-modes/{mode}-3"


def test_the_first_gradients_of_constant_and_token_mean_differ_by_the_tokens_over_the_divisor(tmp_path):
    first = {}
    for mode in ("token_mean", "constant"):
        output = tmp_path / mode
        command = [*_training_options(mode, 1), "--num-rollout", "1", "--output-dir", str(output)]
        assert run_ranks(partial(main, command), 1) == [0]
        first[mode] = json.loads((output / "metrics.jsonl").read_text())
    assert first["token_mean"]["train/num_tokens"] == first["constant"]["train/num_tokens"]
    ratio = first["constant"]["train/grad_norm"] / first["token_mean"]["train/grad_norm"]
    # M / (L N): L = 16 tokens, N = 32 prompts of 8 answers. Norms are float32 sums over some hundred thousand squares.
    assert ratio == pytest.approx(first["token_mean"]["train/num_tokens"] / (16 * 256), rel=1e-5)


def test_the_program_averages_a_metric_over_some_steps(tmp_path, monkeypatch, capsys):
    [(name, code)] = python_files(PAGE).items()
    (tmp_path / name).write_text(code)
    runs = [
        write_run(tmp_path / f"run-{number}", [step(place, number * place) for place in range(6)]) for number in (1, 2)
    ]
    monkeypatch.setattr(sys, "argv", [name, "rollout/raw_reward", "2", "5", *map(str, runs)])
    runpy.run_path(str(tmp_path / name))
    # (2 + 3 + 4) / 3, and twice that.
    assert capsys.readouterr().out == f"{runs[0]} 3.0\n{runs[1]} 6.0\n"
