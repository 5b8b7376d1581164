"""Rejection and loss weights as a property: whatever the rows, what is left of them, the steps of a rollout and the
ranks, a step's value and metrics are those of the fractions oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from miles.backends.training_utils import data as data_room
from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss import compute_advantages_and_returns, loss_function
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.backends.training_utils.step_totals import is_left_empty, prepare_loss_terms
from miles.ray.rollout.train_data_conversion import process_rollout_data_shard, split_train_data_by_dp
from tests.fast import oracle
from tests.fast.backends.training_utils.harness import train_data_of
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, simulated_state
from tests.fast.backends.training_utils.test_pipeline import SCHEDULES, in_two_steps
from tests.fast.backends.training_utils.test_split_properties import PROPERTY, TOLERANCE, steps

VOCAB = 8
UNIFORM = -torch.log(torch.tensor(float(VOCAB))).item()


class Meeting(Exception):
    """A rank has come to a collective whose other members have not been there yet."""


@dataclass
class LockStep:
    """Collectives of ranks that run one after another: all of them up to the first meeting, then to the next."""

    totals: list[torch.Tensor] = field(default_factory=list)
    turn: int = 0
    brought: list[tuple[torch.Tensor, Any]] = field(default_factory=list)

    def reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.turn == len(self.totals):
            self.brought.append((tensor.clone(), op))
            raise Meeting
        self.turn += 1
        return self.totals[self.turn - 1]

    def run(self, function: Callable[[int], Any], size: int) -> list[Any]:
        """What `function(rank)` returns on each rank."""
        while True:
            results, self.brought = [], []
            for rank in range(size):
                self.turn = 0
                axis = _Axis(rank, size, lock_step=self)
                set_parallel_state(ParallelState(intra_dp=axis, intra_dp_cp=axis))
                try:
                    results.append(function(rank))
                except Meeting:
                    continue
            if not self.brought:
                return results
            assert len(self.brought) == size, "every rank runs the same collectives"
            values = torch.stack([tensor for tensor, _ in self.brought])
            self.totals.append(values.amax(0) if self.brought[0][1] == dist.ReduceOp.MAX else values.sum(0))


@dataclass(frozen=True)
class _Axis(GroupInfo):
    lock_step: LockStep | None = None

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        return self.lock_step.reduce(tensor, op)


def _train_data(args, rows):
    """The rows with a ratio of 1 at kept tokens and e^-5 at rejected ones, so that icepop leaves `row.kept`."""
    data = train_data_of(args, rows)
    data["row_ids"] = list(range(len(rows)))
    data["rollout_log_probs"] = [[UNIFORM + 5 * (1 - bit) for bit in row.kept] for row in rows]
    if any(row.loss_weights is not None for row in rows):
        data["loss_weights"] = [[float(weight) for weight in row.token_weights] for row in rows]
    return data


def _prepare(args, rows, shard):
    """A rank's way to its first micro-batch, with a policy loss that is the rows' values."""
    batch = data_room.move_to_device(process_rollout_data_shard(args, dict(shard)), "cpu")
    compute_advantages_and_returns(args, batch)
    batch["log_probs"] = [torch.full((length,), UNIFORM) for length in batch["response_lengths"]]
    batch["advantages"] = [torch.tensor([-float(x) for x in rows[i].values]) for i in batch["row_ids"]]
    iterators, num_microbatches = data_room.get_data_iterator(args, None, batch)
    prepare_loss_terms(args, batch, iterators, num_microbatches)
    return iterators[0], num_microbatches


def _run(args, rows, dp_size, *, megatron):
    """`(row ids, value, metrics)` of each optimizer step; value and metrics are None where it is to be skipped."""
    shards = split_train_data_by_dp(args, _train_data(args, rows), dp_size)
    ranks = LockStep().run(lambda rank: _prepare(args, rows, shards[rank]), dp_size)
    outcomes = []
    for step, num_microbatches in enumerate(ranks[0][1]):
        total, normalizers, logs, seen = 0.0, 0, [], []
        is_empty = {is_left_empty(args, iterator.peek_tokens()) for iterator, _ in ranks}
        assert len(is_empty) == 1, "ranks agree on what is skipped"
        for rank, (iterator, per_step) in enumerate(ranks):
            assert per_step[step] == num_microbatches
            set_parallel_state(simulated_state(dp_size, 1, dp_rank=rank))
            for _ in range(num_microbatches):
                batch = data_room.get_batch(iterator)
                seen += [row for row in batch["row_ids"] if row is not None]
                if True in is_empty:
                    continue
                logits = torch.zeros(*batch["tokens"].shape, VOCAB, requires_grad=True)
                loss, normalizer, log = loss_function(args, batch, num_microbatches, logits, megatron)
                per_token = args.calculate_per_token_loss
                total += loss.item() / (num_microbatches if megatron and not per_token else 1)
                normalizers += int(normalizer)
                logs.append(log)
        set_parallel_state(simulated_state(1, 1))
        average = normalizers if megatron and args.calculate_per_token_loss else dp_size
        done = (None, None) if True in is_empty else (total / average, aggregate_train_losses(logs))
        outcomes.append((sorted(seen), *done))
    return outcomes


@st.composite
def changed(draw, rows):
    """The rows after a rejection, which at times leaves nothing of a row or of all of them, and with loss weights."""
    is_weighted = draw(st.booleans())
    rejected_whole = draw(st.sampled_from([0, 0, 1, len(rows)]))
    result = []
    for place, row in enumerate(rows):
        kept = [bit * draw(st.sampled_from([0, 1, 1])) * (place >= rejected_whole) for bit in row.mask]
        weights = [Fraction(draw(st.integers(0, 12)), 64) for _ in row.mask]
        result.append(replace(row, kept=tuple(kept), loss_weights=tuple(weights) if is_weighted else None))
    return result


def _second_step(row):
    """What `in_two_steps` makes of a changed row."""
    weights = None if row.loss_weights is None else tuple(2 * weight for weight in row.loss_weights)
    return row.kept[::-1], weights


@pytest.mark.parametrize("mode", oracle.MODES)
@PROPERTY
@given(data=st.data())
def test_any_rejection_and_weights_in_two_steps(mode, data):
    counting = oracle.Counting(
        data.draw(st.sampled_from(["drop", "keep"])), data.draw(st.sampled_from(["weights", "tokens"]))
    )
    first = data.draw(changed(data.draw(steps(max_parts=data.draw(st.sampled_from([0, 3]))))))
    rows = in_two_steps(first)
    for place, row in enumerate(first, start=len(first)):
        kept, weights = _second_step(row)
        rows[place - len(first)] = row
        rows[place] = replace(rows[place], kept=kept, loss_weights=weights)
    original = replace(counting, rejected_tokens="keep")
    assume(mode != "token_mean" or all(sum(map(original.total, part)) for part in (first, rows[len(first) :])))
    divisor = data.draw(st.sampled_from([1.0, 2.5])) if mode == "constant" else None
    schedule = SCHEDULES[data.draw(st.sampled_from(list(SCHEDULES)))]
    args = mode_namespace(mode, divisor, **batch_sizes(first), **schedule, use_tis=True, tis_clip_low=0.5)
    args.tis_type, args.aux_loss_aggregation = "icepop", data.draw(st.sampled_from(["match", "sample_mean"]))
    args.rejected_tokens, args.loss_weight_normalization = counting.rejected_tokens, counting.loss_weight_normalization
    dp_size = data.draw(st.integers(1, 3))
    if mode == "prompt_mean" and args.prompt_groups == "complete":
        assume(len(oracle.groups(first)) % dp_size == 0)
    outcomes = _run(args, rows, dp_size, megatron=data.draw(st.booleans()))
    assert [ids for ids, _, _ in outcomes] == [list(range(len(first))), list(range(len(first), len(rows)))]
    for ids, value, metrics in outcomes:
        _assert_step(args, [rows[i] for i in ids], divisor, counting, value, metrics)


def _assert_step(args, rows, divisor, counting, value, metrics):
    mode = args.loss_aggregation
    if mode == "token_mean" and not sum(map(counting.total, rows)):
        assert value is None
        return
    wanted = float(oracle.value(rows, mode, divisor, counting=counting))
    assert value == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
    ones = [[1] * row.response_length for row in rows]
    rejected = [[1 - bit for bit in row.kept] for row in rows]
    auxiliary = (rows, mode) if args.aux_loss_aggregation == "match" else (oracle.unweighted(rows), "sample_mean")
    entropy = -UNIFORM * float(oracle.value(*auxiliary, divisor, column=ones, counting=counting))
    clipped = float(oracle.value(oracle.original(rows), "sample_mean", column=rejected))
    expected = {"loss": wanted, "pg_loss": wanted, "entropy_loss": entropy, "ppo_kl": 0.0, "tis_clipfrac": clipped}
    got = {name: metrics[name] for name in expected}
    assert got == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
