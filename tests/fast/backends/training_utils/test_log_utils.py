"""Metrics across micro-batches and ranks: `sum(values) * cp_size / sum(normalizers)`, a normalizer for each key."""

import random
from fractions import Fraction

import pytest
import torch

from miles.backends.training_utils.data import move_to_device
from miles.backends.training_utils.log_utils import aggregate_train_losses, log_rollout_data, log_train_step
from miles.backends.training_utils.parallel import GroupInfo, set_parallel_state
from miles.ray.rollout.train_data_conversion import process_rollout_data_shard, split_train_data_by_dp
from miles.utils.errors import UserError
from tests.fast.backends.training_utils.harness import train_data_of
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, simulated_state
from tests.fast.oracle import MODES, Row


def legacy(count, **metrics):
    return {"keys": list(metrics), "values": torch.tensor([float(count), *metrics.values()])}


def normalized(**metrics):
    """`name=(sum, normalizer)`."""
    return {
        "keys": list(metrics),
        "values": torch.tensor([float(value) for value, _ in metrics.values()]),
        "normalizers": torch.tensor([normalizer for _, normalizer in metrics.values()]),
    }


def test_no_micro_batch_has_no_metric():
    assert aggregate_train_losses([]) == {}


def test_legacy_dictionaries_share_one_count():
    """(3 - 1) / (2 + 3) and (0.5 + 8) / 5."""
    result = aggregate_train_losses([legacy(2, loss=3.0, kl=0.5), legacy(3, loss=-1.0, kl=8.0)])
    assert result == {"loss": pytest.approx(0.4), "kl": pytest.approx(1.7)}
    assert list(result) == ["loss", "kl"]
    assert all(type(value) is float for value in result.values())


def test_each_key_has_its_own_normalizer():
    """loss: (6 + 1) / (10 + 4) tokens; clipfrac: (0.5 + 1) / (1 + 2) samples."""
    result = aggregate_train_losses(
        [normalized(loss=(6.0, 10), clipfrac=(0.5, 1)), normalized(loss=(1.0, 4), clipfrac=(1.0, 2))]
    )
    assert result == {"loss": pytest.approx(0.5), "clipfrac": pytest.approx(0.5)}


def test_a_micro_batch_without_rows_adds_nothing():
    """Its counts are zero; only the sum over the step has to be positive."""
    result = aggregate_train_losses([normalized(loss=(0.0, 0)), normalized(loss=(3.0, 4)), normalized(loss=(0.0, 0))])
    assert result == {"loss": pytest.approx(0.75)}
    assert aggregate_train_losses([legacy(0, loss=0.0), legacy(4, loss=3.0)]) == {"loss": pytest.approx(0.75)}


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_context_parallel_ranks_each_bring_the_whole_count(cp_size):
    """Every rank holds a share of the sum and the full-sample count, so the count is cp_size times too large."""
    set_parallel_state(simulated_state(1, cp_size))
    shares = [normalized(loss=(6.0 / cp_size + rank - (cp_size - 1) / 2, 8)) for rank in range(cp_size)]
    assert aggregate_train_losses(shares) == {"loss": pytest.approx(0.75)}
    shares = [legacy(8, loss=6.0 / cp_size) for _ in range(cp_size)]
    assert aggregate_train_losses(shares) == {"loss": pytest.approx(0.75)}


def test_any_order_of_micro_batches_and_any_split():
    """Sums are of dyadic numbers, hence equal bit for bit."""
    parts = [normalized(loss=(i * 0.25 - 3, i % 3), clipfrac=(0.5 * i, 1)) for i in range(12)]
    expected = {
        "loss": float(Fraction(sum(i - 12 for i in range(12)), 4) / sum(i % 3 for i in range(12))),
        "clipfrac": float(Fraction(sum(range(12)), 2) / 12),
    }
    for seed in range(5):
        random.Random(seed).shuffle(parts)
        assert aggregate_train_losses(parts) == pytest.approx(expected, rel=1e-12)


def test_counts_beyond_float32_integers_are_exact():
    """2**24 + 1 tokens in all: a float32 count would stay at 2**24, and the mean of ones would not be one."""
    parts = [normalized(loss=(2.0**23, 2**23)) for _ in range(2)] + [normalized(loss=(1.0, 1))]
    assert aggregate_train_losses(parts)["loss"] == 1.0


def test_the_logged_tensors_are_left_alone():
    parts = [normalized(loss=(6.0, 10)), normalized(loss=(1.0, 4))]
    before = [{key: value.clone() for key, value in part.items() if key != "keys"} for part in parts]
    first, second = aggregate_train_losses(parts), aggregate_train_losses(parts)
    assert first == second
    for part, saved in zip(parts, before, strict=True):
        assert all(torch.equal(part[key], value) for key, value in saved.items())


def test_nan_is_shown_and_stays_in_its_own_key():
    result = aggregate_train_losses(
        [normalized(loss=(float("nan"), 1), kl=(2.0, 1)), normalized(loss=(1, 1), kl=(4, 1))]
    )
    assert result["loss"] != result["loss"]
    assert result["kl"] == 3.0


GOOD = normalized(loss=(3.0, 2), kl=(1.0, 2))
BROKEN = {
    "mixed": [GOOD, legacy(2, loss=3.0, kl=1.0)],
    "mixed-legacy-first": [legacy(2, loss=3.0, kl=1.0), GOOD],
    "other-keys": [GOOD, normalized(loss=(3.0, 2), entropy=(1.0, 2))],
    "missing-key": [GOOD, normalized(loss=(3.0, 2))],
    "other-order": [GOOD, normalized(kl=(1.0, 2), loss=(3.0, 2))],
    "other-order-legacy": [legacy(2, a=1.0, b=2.0), legacy(2, b=2.0, a=1.0)],
    "value-count": [GOOD, {**GOOD, "values": torch.tensor([3.0])}],
    "value-count-first": [{**GOOD, "values": torch.tensor([1.0, 3.0, 1.0, 1.0])}],
    "value-count-legacy": [{"keys": ["loss"], "values": torch.tensor([1.0, 3.0, 4.0])}],
    "normalizer-count": [GOOD, {**GOOD, "normalizers": torch.tensor([2.0])}],
    "normalizer-count-first": [{**GOOD, "normalizers": torch.tensor([2.0, 2.0, 2.0])}],
    "normalizer-zero": [normalized(loss=(3.0, 2), kl=(1.0, 0))],
    "normalizer-cancels": [normalized(loss=(3.0, 2)), normalized(loss=(3.0, -2))],
    "normalizer-negative": [normalized(loss=(3.0, -2))],
    "normalizer-nan": [normalized(loss=(3.0, float("nan")))],
    "count-zero-legacy": [legacy(0, loss=3.0)],
}
MESSAGES = {
    "mixed": "normalizers",
    "other": "keys",
    "missing": "keys",
    "value": "values",
    "normalizer-count": "normalizers",
    "normalizer": "positive",
    "count": "positive",
}


@pytest.mark.parametrize("name", BROKEN)
def test_refused(name):
    message = next(text for prefix, text in MESSAGES.items() if name.startswith(prefix))
    with pytest.raises(ValueError, match=message):
        aggregate_train_losses(BROKEN[name])


# ---- the rollout log ----------------------------------------------------------------------------------------------

ROWS = [  # two groups of two
    Row.of([1, 0, 1], [0] * 3, group=0),
    Row.of([1], [0], group=0),
    Row.of([0, 0], [0] * 2, group=1),
    Row.of([1] * 5, [0] * 5, group=1),
]
LOG_PROBS = [[-1.0, -90.0, -2.0], [-4.0], [-70.0, -80.0], [-0.5, -1.5, -2.5, -3.5, -4.5]]


def rollout_data(args, poison=None):
    data = train_data_of(args, ROWS)
    data["rollout_log_probs"] = [list(row) for row in LOG_PROBS]
    if poison is not None:
        data["rollout_log_probs"][0][1] = poison
    (shard,) = split_train_data_by_dp(args, data, 1)
    return move_to_device(process_rollout_data_shard(args, shard), "cpu")


@pytest.mark.parametrize("poison", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES)
def test_rollout_log_survives_every_column_of_every_mode(mode, poison):
    """Sample means of the log-probs: (-1 - 2)/2, -4, 0 for the masked row, -2.5; their mean is -2."""
    args = mode_namespace(mode, **batch_sizes(ROWS))
    data = rollout_data(args, poison)
    assert (mode == "prompt_mean") == ("prompt_mask_sums" in data)
    metrics = log_rollout_data(3, args, data)
    assert metrics["rollout/rollout_log_probs"] == pytest.approx(-2.0)
    assert metrics["rollout/raw_reward"] == pytest.approx((0 + 1 + 2 + 0) / 4)
    assert metrics["rollout/response_lengths"] == pytest.approx((3 + 1 + 2 + 5) / 4)
    assert not [key for key in metrics if "prompt" in key or "mask" in key or "counts" in key]
    assert all(type(value) is float for value in metrics.values())


SEVERAL = [  # rollout 4 is the first and the last row, rollout 1 the two in between, the third one masked
    Row.of([1, 0, 1], [0] * 3, group=0, rollout=4),
    Row.of([1], [0], group=0, rollout=1),
    Row.of([0, 0], [0] * 2, group=0, rollout=1),
    Row.of([1] * 5, [0] * 5, group=0, rollout=4),
]
MEANS = {
    # Rewards are the rollout's number modulo 3: 1 and 1; made 1 and 0 below, so that a mean over rows shows.
    "raw_reward": (1 + 0) / 2,
    "rewards": (0.5 - 0.25) / 2,
    # Rollout 4: (-1 - 2 - 0.5 - 1.5 - 2.5 - 3.5 - 4.5) / 7; rollout 1: -4.
    "rollout_log_probs": (-15.5 / 7 - 4) / 2,
    # Of rows.
    "response_lengths": (3 + 1 + 2 + 5) / 4,
    "total_lengths": (5 + 3 + 4 + 7) / 4,
    "truncated": 0.0,
    "round_number": (1 + 2 + 3 + 6) / 4,
}


def columns_of_several_rows(args):
    data = train_data_of(args, SEVERAL)
    data["rollout_log_probs"] = [list(row) for row in LOG_PROBS]
    data["raw_reward"], data["rewards"] = [1.0, 0.0, 0.0, 1.0], [0.5, -0.25, -0.25, 0.5]
    data["round_number"] = [1, 2, 3, 6]
    return data


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_of_several_rows_count_once_in_rewards_and_token_means(mode):
    args = mode_namespace(mode, **batch_sizes(SEVERAL))
    (shard,) = split_train_data_by_dp(args, columns_of_several_rows(args), 1)
    metrics = log_rollout_data(0, args, move_to_device(process_rollout_data_shard(args, shard), "cpu"))
    assert metrics == {f"rollout/{key}": pytest.approx(value) for key, value in MEANS.items()}


@pytest.mark.parametrize("rows_of_ranks", [[[0], [3, 2], [1]], [[2, 1, 0, 3], []], [[1, 2], [0, 3]]])
def test_any_deal_of_the_rows_logs_the_same(rows_of_ranks, monkeypatch):
    """Sums and counts of the ranks add up, rows of one rollout on several ranks and an empty rank among them."""
    args = mode_namespace("sample_mean", **batch_sizes(SEVERAL))
    (whole,) = split_train_data_by_dp(args, columns_of_several_rows(args), 1)
    whole = process_rollout_data_shard(args, whole)
    place = {row: position for position, row in enumerate(whole["sample_indices"])}
    pairs = []
    monkeypatch.setattr(GroupInfo, "all_reduce", lambda self, tensor: pairs.append(tensor) or tensor)
    for rows in rows_of_ranks:
        columns = {key: column for key, column in whole.items() if key != "step_row_counts"}
        shard = {key: [column[place[row]] for row in rows] for key, column in columns.items()}
        log_rollout_data(0, args, {**move_to_device(shard, "cpu"), "step_row_counts": [len(rows)]})
    totals = torch.stack(pairs).sum(0)
    names = ("rewards", "raw_reward", "response_lengths", "total_lengths", "truncated", "round_number")
    expected = [MEANS[name] for name in (*names, "rollout_log_probs")]
    assert (totals[:, 0] / totals[:, 1]).tolist() == pytest.approx(expected)
    # Two rollouts, four rows.
    assert totals[:, 1].tolist() == [2, 2, 4, 4, 4, 4, 2]


def test_rollout_log_survives_an_unknown_column():
    args = mode_namespace("prompt_mean", **batch_sizes(ROWS))
    data = {**rollout_data(args), "metadata": [{"a": 1}] * 4, "a_new_column": ["x"] * 4}
    assert log_rollout_data(0, args, data)["rollout/rollout_log_probs"] == pytest.approx(-2.0)


def test_train_step_has_the_hosts_names():
    logged = log_train_step(mode_namespace("token_mean"), {"loss": 0.5, "pg_loss": 0.25}, 2.0, 3, 1, 4)
    assert logged == {"train/loss": 0.5, "train/pg_loss": 0.25, "train/grad_norm": 2.0, "train/step": 13}


@pytest.mark.parametrize("name", ["grad_norm", "lr-pg_0", "num_tokens", "step", "skipped_steps"])
def test_a_metric_of_the_loss_does_not_take_the_name_of_the_step_s(name):
    extra = {"lr-pg_0": 0.1, "num_tokens": 7}
    with pytest.raises(UserError, match=f"returned the metric {name}, which every step logs itself; give it another"):
        log_train_step(mode_namespace("token_mean"), {"loss": 0.5, name: 1.0}, 2.0, 3, 1, 4, extra_metrics=extra)
