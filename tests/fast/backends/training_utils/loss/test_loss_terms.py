"""Per-token terms by hand: clips, estimators of KL, corrections, advantages."""

import math
from argparse import Namespace

import pytest
import torch

from miles.backends.training_utils.loss import compute_advantages_and_returns
from miles.backends.training_utils.loss_hub.corrections import icepop_function, vanilla_tis_function
from miles.backends.training_utils.loss_hub.logit_processors import get_values
from miles.backends.training_utils.loss_hub.math_utils import compute_approx_kl, compute_policy_loss
from miles.backends.training_utils.loss_hub.token_scores import score_tokens
from miles.backends.training_utils.parallel import SINGLE, ParallelState, set_parallel_state
from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.backends.training_utils.pipeline import Ledger, RehearsedAxis

LOG2 = math.log(2)


def policy(ratio, advantage, *clips):
    loss, fraction = compute_policy_loss(torch.tensor([-math.log(ratio)]), torch.tensor([advantage]), *clips)
    return loss.item(), fraction.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "clips", "loss", "fraction"),
    [
        (1.0, 3.0, (0.2, 0.2), -3.0, 0),
        (2.0, 3.0, (0.2, 0.2), -3.6, 1),  # good and already likelier: held at 1.2
        (2.0, 3.0, (0.2, 0.28), -3.84, 1),  # clip-higher: 1.28
        (0.5, 3.0, (0.2, 0.2), -1.5, 0),  # good and less likely: free to rise
        (0.5, -3.0, (0.2, 0.2), 2.4, 1),  # bad and already rarer: held at 0.8
        (0.5, -3.0, (0.1, 0.2), 2.7, 1),
        (2.0, -3.0, (0.2, 0.2), 6.0, 0),  # bad and likelier: free to fall
        (8.0, -3.0, (0.2, 0.2), 24.0, 0),
        (8.0, -3.0, (0.2, 0.2, 3.0), 9.0, 0),  # dual clip: at most 3 * 3
        (2.0, -3.0, (0.2, 0.2, 3.0), 6.0, 0),
        (8.0, 3.0, (0.2, 0.2, 3.0), -3.6, 1),  # dual clip leaves positive advantages alone
    ],
)
def test_clipped_surrogate(ratio, advantage, clips, loss, fraction):
    assert policy(ratio, advantage, *clips) == (pytest.approx(loss, rel=1e-6), fraction)


@pytest.mark.parametrize("c", [1.0, 0.5, -2.0])
def test_dual_clip_constant_must_exceed_one(c):
    with pytest.raises(ValueError, match="eps_clip_c"):
        policy(1.0, 1.0, 0.2, 0.2, c)


@pytest.mark.parametrize("gap", [50.0, 1000.0])
def test_one_token_cannot_overflow_the_surrogate(gap):
    ppo_kl = torch.tensor([-gap], requires_grad=True)
    loss, _ = compute_policy_loss(ppo_kl, torch.tensor([-1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert loss.isfinite().all() and ppo_kl.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "value"),
    [("k1", LOG2), ("k2", LOG2**2 / 2), ("k3", 0.5 - 1 + LOG2), ("low_var_kl", 0.5 - 1 + LOG2)],
)
def test_kl_estimators_where_pi_is_twice_the_base(kind, value):
    log_probs, base = torch.tensor([-1.0]), torch.tensor([-1.0 - LOG2])
    assert compute_approx_kl(log_probs, base, kind).item() == pytest.approx(value, rel=1e-6)
    weighted = compute_approx_kl(log_probs, base, kind, importance_ratio=torch.tensor([3.0]))
    assert weighted.item() == pytest.approx(3 * value, rel=1e-6)


def test_low_variance_kl_is_clamped_and_an_unknown_kind_is_named():
    far = compute_approx_kl(torch.tensor([-60.0]), torch.tensor([0.0]), "low_var_kl")
    assert far.item() == 10.0
    with pytest.raises(ValueError, match=r"kl_loss_type.*k4"):
        compute_approx_kl(torch.zeros(1), torch.zeros(1), "k4")


def correct(function):
    ratios = torch.tensor([0.25, 0.75, 1.5, 4.0])
    masks = [torch.tensor([1, 1]), torch.tensor([1, 0])]
    loss, kept, metrics = function(
        args=Namespace(tis_clip=2.0, tis_clip_low=0.5),
        pg_loss=torch.tensor([8.0, -4.0, 2.0, 1.0]),
        train_log_probs=list((ratios.log() - 1).split(2)),
        rollout_log_probs=list(torch.full((4,), -1.0).split(2)),
        loss_masks=masks,
        total_lengths=[3, 3],
        response_lengths=[2, 2],
    )
    assert kept is masks
    assert metrics["tis"].tolist() == pytest.approx(ratios.tolist(), rel=1e-6)
    assert metrics["tis_abs"].tolist() == pytest.approx([0.75, 0.25, 0.5, 3.0], rel=1e-6)
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 0, 1]
    return loss.tolist()


def test_truncated_importance_sampling():
    assert correct(vanilla_tis_function) == pytest.approx([4.0, -3.0, 3.0, 2.0], rel=1e-6)


def test_icepop():
    assert correct(icepop_function) == pytest.approx([0.0, -3.0, 3.0, 0.0], rel=1e-6)


def test_log_probs_and_entropy_of_a_known_distribution():
    """Logits log(1, 2, 5): p = 1/8, 1/4, 5/8, whatever constant is added."""
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]).log() + torch.tensor([[0.0], [30.0]])
    log_probs, entropy = score_tokens(logits, torch.arange(2), torch.tensor([1, 2]), tp=SINGLE)
    assert log_probs.tolist() == pytest.approx([math.log(1 / 4), math.log(5 / 8)], rel=1e-5)
    expected = -sum(p * math.log(p) for p in (1 / 8, 1 / 4, 5 / 8))
    assert entropy.tolist() == pytest.approx([expected] * 2, rel=1e-5)


def test_a_value_head_has_one_output():
    with pytest.raises(ValueError, match="one output"):
        get_values(
            torch.zeros(1, 3, 2),
            args=mode_namespace("sample_mean"),
            unconcat_tokens=[torch.zeros(3, dtype=torch.int64)],
            total_lengths=[3],
            response_lengths=[2],
        )


# ---- advantages ---------------------------------------------------------------------------------------------------

MASKS = [[1, 1, 0], [1], [0, 0], [1, 0, 1, 1]]
REWARDS = [1.5, -0.5, 9.0, -1.0]


def rows(indices, estimator="grpo", **options):
    batch = {
        "rewards": [REWARDS[i] for i in indices],
        "loss_masks": [torch.tensor(MASKS[i]) for i in indices],
        "response_lengths": [len(MASKS[i]) for i in indices],
        "total_lengths": [len(MASKS[i]) + 2 for i in indices],
    }
    compute_advantages_and_returns(mode_namespace("sample_mean", advantage_estimator=estimator, **options), batch)
    return batch


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "reinforce_plus_plus_baseline"])
def test_each_token_gets_its_rows_reward(estimator):
    batch = rows(range(4), estimator)
    expected = [[reward] * len(mask) for reward, mask in zip(REWARDS, MASKS, strict=True)]
    assert [row.tolist() for row in batch["advantages"]] == expected
    assert [row.tolist() for row in batch["returns"]] == expected
    assert {row.dtype for row in batch["advantages"]} == {torch.float32}


def test_no_rows_have_no_advantages():
    assert rows([])["advantages"] == [] == rows([], normalize_advantages=True)["advantages"]


def test_unknown_estimator():
    with pytest.raises(ValueError, match=r"advantage_estimator.*ppo"):
        rows([0], "ppo")


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[3], [], [2, 1, 0]]])
def test_whitening_is_over_the_active_tokens_of_every_rank(split):
    """Active: 1.5, 1.5, -0.5, -1, -1, -1. Mean -1/12; the unbiased variance by the loop below."""
    active = [reward for reward, mask in zip(REWARDS, MASKS, strict=True) for bit in mask if bit]
    mean = sum(active) / len(active)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in active) / (len(active) - 1))
    ledger = Ledger()
    for ledger.rehearsing in (True, False):
        found = {}
        for rank, indices in enumerate(split):
            axis = RehearsedAxis(rank, len(split), ledger=ledger)
            set_parallel_state(ParallelState(intra_dp=axis, intra_dp_cp=axis))
            batch = rows(indices, normalize_advantages=True)
            found |= dict(zip(indices, batch["advantages"], strict=True))
    for i, row in found.items():
        for bit, advantage in zip(MASKS[i], row.tolist(), strict=True):
            assert not bit or advantage == pytest.approx((REWARDS[i] - mean) / deviation, rel=1e-5)
