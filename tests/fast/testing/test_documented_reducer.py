"""VL norm of docs/customization.md, whose weights depend on the whole step, is the paper's under every split."""

import sys
from collections import Counter

import pytest

from miles.backends.megatron_utils.availability import check_megatron
from miles.testing import CustomReducer, FSDPBackend, MegatronBackend, Split, check_invariance
from miles.testing.averages import rollout_keys, row_weights
from miles.utils.errors import UserError
from tests.fast.docs.test_customization import python_files
from tests.fast.testing.changed_steps import ICEPOP, MATCH, NORMALIZATIONS, changed_step, emptying_splits, without

LONGEST = 16


def _vl_norm_of_step(rows, kept, normalizer):
    return _norm(rows, kept, [[1] * len(row.mask) for row in rows])


def _weighted_vl_norm_of_step(rows, kept, normalizer):
    return _norm(rows, kept, [row_weights(row) for row in rows])


def _norm(rows, kept, weights):
    """L_i^-3/4 / (L_max sum_j L_j^-3/4), L the kept tokens of a sample, or their weights; 1 where none is left."""
    lengths = Counter()
    for key, mask, of_row in zip(rollout_keys(rows), kept, weights, strict=True):
        lengths[key] += sum(bit * weight for bit, weight in zip(mask, of_row, strict=True))
    powers = {key: (length or 1) ** -0.75 for key, length in lengths.items()}
    total = LONGEST * sum(powers.values())
    return [[powers[key] / total] * len(mask) for key, mask in zip(rollout_keys(rows), kept, strict=True)]


@pytest.fixture
def steps(tmp_path, monkeypatch):
    code = python_files("docs/customization.md")["my_step_reducers.py"]
    (tmp_path / "my_step_reducers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    reducer = CustomReducer("my_step_reducers.vl_norm", _vl_norm_of_step)
    longest = ("--rollout-max-response-len", str(LONGEST))
    plain = [
        changed_step("sample_mean", *longest, rows=without("loss_weights"), reducer=reducer),
        changed_step("prompt_mean", *longest, *ICEPOP, rows=without("loss_weights"), reducer=reducer),
    ]
    weighted = CustomReducer(reducer.path, _weighted_vl_norm_of_step)
    yield [
        *plain,
        changed_step("token_mean", *longest, *MATCH, *ICEPOP, *NORMALIZATIONS[1], reducer=reducer),
        changed_step("constant", *longest, *ICEPOP, reducer=weighted),
    ]
    sys.modules.pop("my_step_reducers", None)


@pytest.mark.parametrize("dp", [1, 2])
def test_on_fsdp(steps, dp):
    check_invariance(steps, FSDPBackend(), [*emptying_splits(dp=dp), Split(dp=dp, micro_batch_size=1)], shrink=False)


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_on_megatron(steps, sizes):
    try:
        check_megatron()
    except UserError as error:
        pytest.skip(str(error))
    check_invariance(steps, MegatronBackend(), emptying_splits(**sizes), shrink=False)
