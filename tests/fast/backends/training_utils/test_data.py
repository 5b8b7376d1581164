"""Shards to micro-batches: schedules, packing, and what a rank without rows does."""

import operator

import pytest
import torch

from miles.backends.training_utils import data as data_module
from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.loss_term import LossTerm
from miles.backends.training_utils.parallel import set_parallel_state
from miles.ray.rollout.train_data_conversion import process_rollout_data_shard, split_train_data_by_dp
from miles.utils.options import Options
from miles.utils.seqlen_balancing import get_seqlen_balanced_partitions, pack_by_token_budget
from tests.fast.backends.training_utils.harness import train_data_of
from tests.fast.backends.training_utils.layout import chunk_positions, mode_namespace, simulated_state
from tests.fast.backends.training_utils.pipeline import sample_ids, schedules
from tests.fast.oracle import Row

LENGTHS = [7, 1, 3, 2, 9, 4, 4, 8]
ROWS = [
    Row.of([int((i + t) % 3 != 0) for t in range(n)], [i + t for t in range(n)], group=i // 2, prompt_length=1 + i % 3)
    for i, n in enumerate(LENGTHS)
]
TOTALS = [row.total_length for row in ROWS]  # 8, 3, 6, 3, 11, 7, 5, 10


def namespace(mode="sample_mean", **overrides):
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 4, **overrides}
    return mode_namespace(mode, **sizes)


def one_rank(args, rows=ROWS, with_log_probs=False):
    data = train_data_of(args, rows)
    if with_log_probs:
        data["rollout_log_probs"] = [[-0.5 * (t + 1) for t in range(row.response_length)] for row in rows]
    (shard,) = split_train_data_by_dp(args, data, 1)
    return data_module.move_to_device(process_rollout_data_shard(args, shard), "cpu")


def joined(lists):
    return [item for items in lists for item in items]


def drain(iterator):
    return [iterator.get_next() for _ in iterator.micro_batch_indices]


# ---- balancing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 5, 11])
def test_balanced_partitions_hold_each_item_once_and_equal_numbers(num_partitions):
    parts = get_seqlen_balanced_partitions(TOTALS, num_partitions)
    assert len(parts) == num_partitions and sorted(joined(parts)) == list(range(len(TOTALS)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_balanced_partitions_beat_dealing_in_turn():
    lengths = [100, 1, 90, 2, 80, 3, 70, 4]
    loads = [sum(lengths[i] for i in part) for part in get_seqlen_balanced_partitions(lengths, 2)]
    assert abs(loads[0] - loads[1]) <= 10 < 340 - 10  # in turn: 340 and 10


@pytest.mark.parametrize("budget", [1, 8, 11, 20, 1000])
def test_bins_respect_the_budget_unless_one_item_breaks_it_alone(budget):
    bins = pack_by_token_budget(TOTALS, budget)
    assert sorted(joined(bins)) == list(range(len(TOTALS))) and all(bins)
    for items in bins:
        assert len(items) == 1 or sum(TOTALS[i] for i in items) <= budget
    if budget == 1000:
        assert len(bins) == 1
    assert pack_by_token_budget([], budget) == []


# ---- schedules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "expected"), [(1, [4, 4]), (2, [2, 2]), (3, [2, 2]), (4, [1, 1]), (64, [1, 1])])
def test_fixed_micro_batches(size, expected):
    args = namespace(micro_batch_size=size)
    (iterator,), num_microbatches = data_module.get_data_iterator(args, None, one_rank(args))
    assert num_microbatches == expected
    rows = [batch["sample_indices"] for batch in drain(iterator)]
    assert joined(rows) == list(range(8)), "in order"
    assert all(len(ids) <= size and len({i // 4 for i in ids}) == 1 for ids in rows), "never over a step's end"


@pytest.mark.parametrize("budget", [3, 9, 12, 20, 100])
def test_token_budget(budget):
    args = namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=budget)
    (iterator,), num_microbatches = data_module.get_data_iterator(args, None, one_rank(args))
    batches = [batch["sample_indices"] for batch in drain(iterator)]
    assert len(batches) == sum(num_microbatches)
    first = batches[: num_microbatches[0]]
    assert sorted(joined(first)) == [0, 1, 2, 3] and sorted(joined(batches)) == list(range(8))
    for ids in batches:
        assert ids and (len(ids) == 1 or sum(TOTALS[i] for i in ids) <= budget)


def test_token_budget_is_per_context_parallel_rank():
    args = namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=10)
    set_parallel_state(simulated_state(1, 2))
    _, num_microbatches = data_module.get_data_iterator(args, None, one_rank(args))
    assert num_microbatches[0] == 1  # 8 + 3 + 6 + 3 = 20 tokens over two ranks


@pytest.mark.parametrize(
    "schedule", [{"micro_batch_size": 1}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 5}]
)
def test_ranks_agree_on_the_number_of_micro_batches(schedule):
    """Four rows over three ranks, then over five: ranks with fewer rows run empty micro-batches."""
    args = namespace(global_batch_size=8, **schedule)
    for dp_size in (3, 5, 9):
        ranks = schedules(args, ROWS, dp_size)
        assert len({tuple(per_step) for *_, per_step in ranks}) == 1
        rows = [[sample_ids(batch) for batch in drain(iterator)] for _, _, iterator, _ in ranks]
        assert {len(batches) for batches in rows} == {ranks[0][3][0]}
        assert sorted(i for batches in rows for ids in batches for i in ids) == list(range(8))
        if dp_size == 9:
            assert [[]] in rows, "one rank has no row at all"


def test_the_iterator_starts_again():
    args = namespace()
    (iterator,), _ = data_module.get_data_iterator(args, None, one_rank(args))
    first = [batch["sample_indices"] for batch in drain(iterator)]
    iterator.reset()
    assert [batch["sample_indices"] for batch in drain(iterator)] == first


# ---- step counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token_mean", "prompt_mean"])
def test_step_counts(mode):
    args = namespace(mode)
    active = [sum(row.mask) for row in ROWS]
    prompts = 2 if mode == "prompt_mean" else 0
    expected = [StepCounts(4, prompts, sum(active[:4])), StepCounts(4, prompts, sum(active[4:]))]
    assert data_module.get_step_counts(one_rank(args)) == expected


def test_step_counts_of_rollouts_with_several_rows_and_masked_rows():
    rows = [Row.of([1, 0], [0, 0], group=0, rollout=r) for r in (5, 5, 6)] + [Row.of([0], [0], group=0, rollout=7)]
    args = namespace("prompt_mean", global_batch_size=3, n_samples_per_prompt=3, rollout_batch_size=1)
    counts = data_module.get_step_counts(one_rank(args, rows))
    assert counts == [StepCounts(num_samples=3, num_prompts=1, num_tokens=3)]


# ---- tensors and packing ------------------------------------------------------------------------------------------


def test_columns_become_tensors():
    args = namespace("prompt_mean")
    data = one_rank(args, with_log_probs=True)
    for key, dtype in [("tokens", torch.int64), ("loss_masks", torch.int64), ("rollout_log_probs", torch.float32)]:
        assert [x.dtype for x in data[key]] == [dtype] * 8, key
    assert [mask.tolist() for mask in data["loss_masks"]] == [list(row.mask) for row in ROWS]
    sums = data["prompt_mask_sums"]
    assert sums.dtype == torch.int64 and sums.shape == (8,)
    assert sums.tolist() == [sum(sum(r.mask) for r in ROWS if r.group == row.group) for row in ROWS]


def test_an_empty_shard_becomes_tensors():
    args = namespace(global_batch_size=8)
    shards = split_train_data_by_dp(args, train_data_of(args, ROWS), 9)
    empty = next(shard for shard in shards if not shard["tokens"])
    data = data_module.move_to_device(process_rollout_data_shard(args, empty), "cpu")
    assert data["tokens"] == [] == data["loss_masks"]
    assert data_module.get_step_counts(data) == [StepCounts(0, 0, 0)]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_batch(cp_size):
    """Tokens and positions of each row at the places of its zigzag chunks; boundaries of the whole padded rows."""
    args = namespace(micro_batch_size=3)
    for cp_rank in range(cp_size):
        set_parallel_state(simulated_state(1, cp_size, cp_rank=cp_rank))
        data = one_rank(args)
        (iterator,), _ = data_module.get_data_iterator(args, None, data)
        batch = data_module.get_batch(iterator, pad_token_id=99)
        tokens, positions, boundaries = [], [], [0]
        for i in batch["sample_indices"]:
            owned = chunk_positions(TOTALS[i], cp_rank, cp_size)
            tokens += [99 if p is None else data["tokens"][i][p].item() for p in owned]
            positions += [0 if p is None else p for p in owned]
            boundaries.append(boundaries[-1] + len(owned) * cp_size)
        assert batch["tokens"].tolist() == [tokens] and batch["tokens"].dtype == torch.int64
        assert batch["position_ids"].tolist() == [positions]
        assert batch["cu_seqlens"].tolist() == boundaries and batch["cu_seqlens"].dtype == torch.int32
        assert batch["max_seqlen"] == max(map(operator.sub, boundaries[1:], boundaries[:-1]))
        assert [row.tolist() for row in batch["unconcat_tokens"]] == [row.tolist() for row in data["tokens"][:3]]
        assert batch["total_lengths"] == TOTALS[:3] and batch["response_lengths"] == LENGTHS[:3]


def test_an_empty_micro_batch_has_one_pad_token():
    args = namespace(global_batch_size=8)
    _, _, iterator, _ = next(rank for rank in schedules(args, ROWS, 9) if rank[2].micro_batch_indices == [[]])
    batch = data_module.get_batch(iterator, pad_token_id=3)
    assert batch["tokens"].tolist() == [[3]] and [row.shape for row in batch["loss_masks"]] == [(0,)]
    assert (
        batch["response_lengths"] == [0]
        and batch["rollout_counts"].tolist() == [0]
        and batch["step_counts"].num_samples == 8
    )


@pytest.mark.parametrize("cp", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_the_blank_row_of_an_empty_micro_batch_is_reduced_in_both_layouts(qkv_format, cp):
    set_parallel_state(simulated_state(1, cp[1], cp_rank=cp[0]))
    args = namespace(qkv_format=qkv_format)
    data = one_rank(args)
    data["max_seq_lens"] = [16] * len(ROWS)
    batch = data_module.DataIterator(data, [[]], [StepCounts(4, 2, 9)]).get_next()
    reduce = LossTerm.of(Responses(Options.of(args), batch)).default_reducer()
    assert reduce(torch.zeros(0, requires_grad=True)).item() == 0
