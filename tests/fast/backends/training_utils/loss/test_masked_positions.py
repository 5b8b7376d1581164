"""What stands at a masked position, NaN included, reaches neither a sum nor a gradient; at an active one it shows."""

import math

import pytest
import torch

from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.backends.training_utils.loss.calls import call
from tests.fast.backends.training_utils.loss.inputs import CUT, ROWS, VOCAB, Step, packed
from tests.fast.backends.training_utils.loss.test_loss_snapshot import TIS, run
from tests.fast.oracle import MODES

NAN, INF = float("nan"), float("inf")
EVERYTHING = {**TIS, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "entropy_coef": 0.01}
POISONED = {
    "policy": ("policy_loss", EVERYTHING),
    "low-var": ("policy_loss", {**EVERYTHING, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}),
    "gspo": ("policy_loss", {**EVERYTHING, "advantage_estimator": "gspo"}),
    "sft": ("sft_loss", {}),
    "value": ("value_loss", {}),
}


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["columns", "logits"])
@pytest.mark.parametrize("name", POISONED)
@pytest.mark.parametrize("mode", MODES)
def test_masked_positions_reach_neither_sum_nor_gradient(mode, name, where, poison):
    loss_type, options = POISONED[name]
    if mode == "token_mean":
        options = {k: v for k, v in options.items() if k not in ("entropy_coef", "kl_loss_coef")}
    args = mode_namespace(mode, loss_type=loss_type, **options)
    indices = (1, 3, 4, 5)

    def spoil(batch, leaves, logits):
        for position, i in enumerate(indices):
            off = torch.tensor(ROWS[i].mask) == 0
            for key in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "values", "returns"):
                if where == "columns":
                    batch[key][position][off] = poison
            if where == "logits":
                with torch.no_grad():
                    start = ROWS[i].prompt_length - 1
                    leaves[i][start : start + ROWS[i].response_length][off] = poison
        return packed(leaves, logits.size(-1))

    clean_loss, _, clean_log, clean_leaves, _ = call(args, indices)
    loss, _, log, leaves, _ = call(args, indices, change=spoil)
    clean_loss.backward()
    loss.backward()
    assert math.isfinite(loss.item()) and loss.item() == clean_loss.item()
    assert torch.equal(log["values"], clean_log["values"])
    for i in indices:
        assert torch.equal(leaves[i].grad, clean_leaves[i].grad)


@pytest.mark.parametrize("key", ["log_probs", "advantages"])
def test_nan_at_an_active_token_is_not_turned_into_a_number(key):
    def spoil(batch, *_):
        batch[key][0][0] = NAN

    assert math.isnan(call(mode_namespace("sample_mean"), change=spoil)[0].item())


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_logits_are_reduced_in_float32(mode):
    def lower(batch, leaves, logits):
        return logits.to(torch.bfloat16)

    loss, _, log, *_ = call(mode_namespace(mode), change=lower)
    assert loss.dtype == log["values"].dtype == torch.float32


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_log_probs_in_chunks_are_the_same(chunk):
    whole = run(mode_namespace("prompt_mean"), Step(), CUT)
    parts = run(mode_namespace("prompt_mean", log_probs_chunk_size=chunk), Step(), CUT)
    assert parts[0] == whole[0] and parts[2] == whole[2]


def test_bshd_gives_the_loss_of_thd():
    """Rows padded to a common length, logits `[B, S, V]`."""
    args = mode_namespace("prompt_mean", qkv_format="bshd")

    def pad(batch, leaves, logits):
        longest = max(batch["total_lengths"]) + 2
        batch["max_seq_lens"] = [longest] * len(leaves)
        pieces = [torch.cat([x, torch.full((longest - len(x), VOCAB), NAN)]) for x in leaves.values()]
        return torch.stack(pieces)

    padded = call(args, (0, 1, 4), change=pad)
    plain = call(mode_namespace("prompt_mean"), (0, 1, 4))
    assert padded[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    assert padded[2]["values"].tolist() == pytest.approx(plain[2]["values"].tolist(), rel=1e-6)
