"""The page on the drop-in: its step by hand is exact on two gloo processes, and its example of a seam edits."""

import importlib
import shutil
import sys

import libcst as cst
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from miles.backends.training_utils.loss_aggregation import MODES
from miles.drop_in.seam import SeamError
from miles.testing import run_world
from tests.fast.docs.test_customization import ROOT, python_files

# Group, mask and features of each response token of a row: short rows with high losses, long ones with low.
ROWS = [
    ("a", (1, 1), ((3.0, 1.0), (2.0, -1.0))),
    ("a", (1, 0, 1, 1), ((0.5, 0.1), (9.0, 9.0), (0.2, 0.0), (-0.1, 0.3))),
    ("b", (0, 0, 0), ((5.0, 5.0), (1.0, 0.0), (7.0, 2.0))),
    ("b", (1,), ((-2.0, 4.0),)),
]
WEIGHTS = (0.25, -0.5)
DIVISOR = 3.0
# Rows of each micro-batch of each of the two ranks.
SPLITS = [
    [[[0, 1, 2, 3]], [[]]],
    [[[0], [1], [3]], [[2]]],
    [[[3, 0]], [[1], [2]]],
    [[[1, 2], [3]], [[0]]],
    [[[]], [[2, 1, 0, 3]]],
]


def token_weights(mode):
    """Weight of each active token in the step's value, one sentence for each mode."""
    active = [sum(mask) for _, mask, _ in ROWS]
    of_group = {group: sum(n for (other, *_), n in zip(ROWS, active, strict=True) if other == group) for group in "ab"}
    return {
        "sample_mean": [1 / (4 * max(n, 1)) for n in active],
        "prompt_mean": [1 / (2 * of_group[group]) for group, *_ in ROWS],
        "token_mean": [1 / 6] * 4,  # 2 + 3 + 0 + 1 active tokens
        "constant": [1 / (DIVISOR * 4)] * 4,
    }[mode]


def expected(mode):
    """Value and gradient: a token's loss is the square of its features' product with the weights."""
    value, gradient = 0.0, [0.0, 0.0]
    for (_, mask, features), weight in zip(ROWS, token_weights(mode), strict=True):
        for bit, (x, y) in zip(mask, features, strict=True):
            score = WEIGHTS[0] * x + WEIGHTS[1] * y
            value += weight * bit * score**2
            gradient[0] += weight * bit * 2 * score * x
            gradient[1] += weight * bit * 2 * score * y
    return value, gradient


def token_loss(model, rows):
    return model(torch.cat([torch.zeros(0, 2), *(row["features"] for row in rows)])).squeeze(-1) ** 2


def run_rank(train_step, mode):
    """Value and gradient of every cut, on this rank."""
    dist.init_process_group("gloo")
    rows = [
        {"group": group, "mask": torch.tensor(mask), "features": torch.tensor(features)}
        for group, mask, features in ROWS
    ]
    found = []
    for cut in SPLITS:
        linear = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor([WEIGHTS]))
        micro_batches = [[rows[i] for i in part] for part in cut[dist.get_rank()]]
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.0)
        model = DistributedDataParallel(linear)
        loss = train_step(model, optimizer, micro_batches, token_loss, mode, DIVISOR)
        found.append((loss.item(), linear.weight.grad[0].tolist()))
    return found


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's modules, with the file that it says to copy beside them."""
    shutil.copy(ROOT / "miles/backends/training_utils/loss_aggregation.py", tmp_path)
    for name, code in python_files("docs/drop-in.md").items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.parametrize("mode", list(MODES))
def test_the_step_by_hand_is_exact_however_it_is_cut(page, mode):
    train_step = page("ddp_step").train_step
    value, gradient = expected(mode)
    for rank in run_world(lambda: run_rank(train_step, mode), 2, time_limit=120):
        for loss, found in rank:
            assert loss == pytest.approx(value, rel=1e-6)
            assert found == pytest.approx(gradient, rel=1e-6)


HOST = """\
from my_trainer.utils import batches


def evaluate(args, masks):
    num_tokens = sum(map(len, masks))
    return num_tokens
"""

EDITED = """\
from my_trainer.utils import batches, loss_aggregation_adapter


def evaluate(args, masks):
    num_tokens = sum(map(len, masks))
    num_tokens = loss_aggregation_adapter.count_active_tokens(args, masks, num_tokens)
    return num_tokens
"""


def test_the_example_of_a_seam(page):
    seam = page("my_seam").EvaluationMask("my_trainer/evaluation.py", "my_trainer.utils")
    assert seam.edit(cst.parse_module(HOST)).code == EDITED
    with pytest.raises(SeamError, match=r"changed already: loss_aggregation_adapter\.count_active_tokens is called"):
        seam.edit(cst.parse_module(EDITED))
    with pytest.raises(SeamError, match="there is no assignment to num_tokens in evaluate"):
        seam.edit(cst.parse_module(HOST.replace("num_tokens", "count")))
