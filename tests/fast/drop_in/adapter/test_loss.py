"""The adapter on the training side: reducers, counts, normalizers."""

from types import SimpleNamespace

import pytest
import torch

from tests.fast.drop_in.adapter.files import arguments

MASKS = [torch.tensor([1, 1]), torch.tensor([0, 1, 1]), torch.tensor([0])]
BATCH = {"total_lengths": [3, 4, 3], "response_lengths": [2, 3, 1], "max_seq_lens": None}
VALUES = torch.tensor([1.0, 2.0, float("nan"), 4.0, 8.0, 16.0])


def default(values):
    return "default"


def whole(mask, total_length, response_length):
    assert len(mask) == response_length < total_length
    return mask


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_aggregation": "token_mean"}, 1 + 2 + 4 + 8),
        ({"loss_aggregation": "constant", "loss_aggregation_divisor": 0.5}, 15 / 0.5),
        # Groups of 2 and 5 active tokens, two samples each: d is 1 and 2.5.
        ({}, 3 / 1 + 12 / 2.5),
    ],
)
def test_reducers(adapter, given, expected):
    for sums in (torch.tensor([2, 5, 5]), [2, 5, 5], [torch.tensor(2), torch.tensor(5), torch.tensor(5)]):
        batch = {**BATCH, "prompt_mask_sums": sums}
        reducer = adapter.get_pg_loss_reducer(arguments(**given), batch, MASKS, default, whole)
        assert reducer(VALUES).item() == pytest.approx(expected)


def test_a_padded_layout_is_sliced_with_its_lengths(adapter):
    seen = []

    def second_half(mask, *layout):
        seen.append(layout)
        return mask[1:]

    args = arguments(loss_aggregation="token_mean", qkv_format="bshd")
    batch = {**BATCH, "max_seq_lens": [6, 6, 6]}
    reducer = adapter.get_pg_loss_reducer(args, batch, MASKS, default, second_half)
    assert reducer(torch.tensor([2.0, 4.0, 8.0])).item() == 14
    assert seen == [(3, 2, "bshd", 6), (4, 3, "bshd", 6), (3, 1, "bshd", 6)]


def test_the_default_reducer_stays(adapter):
    for mode in (None, "sample_mean"):
        args = arguments(loss_aggregation=mode)
        assert adapter.get_pg_loss_reducer(args, BATCH, MASKS, default, None) is default


def test_prompt_mean_needs_its_column(adapter):
    with pytest.raises(ValueError, match=r"prompt_mean needs batch\['prompt_mask_sums'\]"):
        adapter.get_pg_loss_reducer(arguments(), {**BATCH, "prompt_mask_sums": None}, MASKS, default, whole)


def test_which_reducers_sum_tokens(adapter):
    legacy = arguments(loss_aggregation=None, calculate_per_token_loss=True)
    assert adapter.sums_tokens(legacy) is True
    token_mean = arguments(loss_aggregation="token_mean", calculate_per_token_loss=True)
    assert adapter.sums_tokens(token_mean) is False
    for loss_type in ("sft_loss", "value_loss", "custom_loss"):
        token_mean.loss_type = loss_type
        assert adapter.sums_tokens(token_mean) is True


def test_counts(adapter):
    assert adapter.count_active_tokens(arguments(loss_aggregation="token_mean"), MASKS, 5).item() == 4
    assert adapter.count_active_tokens(arguments(loss_aggregation=None), MASKS, 5) == 5


def test_the_column_moves_as_one_tensor(adapter):
    data = {"loss_masks": MASKS, "prompt_mask_sums": [2, 5, 5]}
    adapter.move_prompt_mask_sums(data)
    assert data["prompt_mask_sums"].dtype == torch.int64
    assert data["prompt_mask_sums"].tolist() == [2, 5, 5]
    rest = {"loss_masks": MASKS}
    adapter.move_prompt_mask_sums(rest)
    assert rest.keys() == {"loss_masks"}


@pytest.mark.parametrize(
    ("size", "indices", "num_microbatches", "expected"),
    [
        (1, None, [1, 2], [2, 2]),
        (3, None, [1], [4]),
        (None, [[2, 1], [0]], [1, 1], [2, 2]),
        (1, None, [2], [4]),  # the last row is of no step
    ],
)
def test_step_tokens(adapter, monkeypatch, size, indices, num_microbatches, expected):
    groups = []
    monkeypatch.setattr(adapter.dist, "all_reduce", lambda counts, group: groups.append((counts.dtype, group)))
    rows = SimpleNamespace(rollout_data={"loss_masks": MASKS}, micro_batch_size=size, micro_batch_indices=indices)
    args = arguments(loss_aggregation="token_mean")
    assert adapter.count_step_tokens(args, rows, num_microbatches, "ranks") == expected
    assert groups == [(torch.int64, "ranks")]
    assert adapter.count_step_tokens(arguments(), rows, num_microbatches, "ranks") == [None] * len(num_microbatches)


def test_the_divisor(adapter):
    args, loss = arguments(loss_aggregation="token_mean"), torch.tensor(6.0)
    assert adapter.divide_by_step_tokens(args, {"step_num_tokens": 4}, loss, 2).item() == 3
    assert adapter.divide_by_step_tokens(arguments(), {}, loss, 2) is loss
    with pytest.raises(ValueError, match=r"token_mean needs batch\['step_num_tokens'\]"):
        adapter.divide_by_step_tokens(args, {}, loss, 2)
    with pytest.raises(ValueError, match="at least one active token in the optimizer step, got 0"):
        adapter.divide_by_step_tokens(args, {"step_num_tokens": 0}, loss, 2)


METRICS = {"loss": torch.tensor(3.0), "ppo_kl": torch.tensor(1.0), "ess_ratio": torch.tensor(2.0)}


def test_normalizers_of_the_policy_loss(adapter):
    args = arguments(loss_aggregation="token_mean")
    log = adapter.normalize_by_key(args, METRICS, torch.tensor(7), 6, 4)
    assert log["values"].tolist() == [3, 1, 2]
    assert log["normalizers"].tolist() == [7, 1.5, 7]
    args.loss_type = "sft_loss"
    assert adapter.normalize_by_key(args, METRICS, torch.tensor(7), 6)["normalizers"].tolist() == [7, 7, 7]
    assert adapter.normalize_by_key(arguments(), METRICS, torch.tensor(7), 6) == {}


def log_of(values, normalizers, keys=("loss", "ppo_kl")):
    return {"keys": list(keys), "values": torch.tensor(values), "normalizers": torch.tensor(normalizers)}


def test_aggregation(adapter, monkeypatch):
    def double(total, group):
        total *= 2 if group == "two" else 3

    monkeypatch.setattr(adapter.dist, "all_reduce", double)
    logs = [log_of([3.0, 1.0], [2**25, 2]), log_of([5.0, 7.0], [1, 0])]
    found = adapter.aggregate_by_key(logs, 2, ["two", "three"])
    assert found == {"loss": 8 * 2 / (2**25 + 1), "ppo_kl": 8 * 2 / 2}
    assert adapter.aggregate_by_key([{"keys": ["loss"], "values": torch.ones(2)}], 1, []) is None


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        (
            [log_of([1.0, 1.0], [1, 1]), {"keys": ["loss", "ppo_kl"], "values": torch.ones(3)}],
            "mix the legacy form with",
        ),
        (
            [log_of([1.0, 1.0], [1, 1]), log_of([1.0, 1.0], [1, 1], ("ppo_kl", "loss"))],
            "differ in keys or their order",
        ),
        ([log_of([1.0], [1, 1])], "expected 2 values, got 1"),
        ([log_of([1.0, 1.0], [1, 1, 1])], "expected 2 normalizers, got 3"),
        ([log_of([1.0, 1.0], [1, 0])], "the normalizer of metric 'ppo_kl' must be positive over the step, got 0"),
    ],
)
def test_logs_that_are_refused(adapter, logs, message):
    with pytest.raises(ValueError, match=message):
        adapter.aggregate_by_key(logs, 1, [])
