"""How often ranks meet, and how often a micro-batch's metrics are reduced."""

from dataclasses import dataclass, field

import pytest
import torch

from miles.backends.training_utils.data import DataIterator, get_step_counts
from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss_aggregation import StepCounts, make_reducer
from miles.backends.training_utils.loss_hub.pg_loss_reducer import reduce_together
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.backends.training_utils.step_weights import describe_steps
from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.backends.training_utils.operations import Operations


@dataclass(frozen=True)
class CountingAxis(GroupInfo):
    """An axis that notes what crosses it."""

    seen: list = field(default_factory=list)

    def all_reduce(self, tensor, op=None):
        self.seen.append(tuple(tensor.shape))
        return tensor


@pytest.fixture
def axis():
    axis = CountingAxis(0, 2)
    set_parallel_state(ParallelState(intra_dp=axis, intra_dp_cp=axis))
    return axis


def test_all_counts_of_all_steps_cross_the_ranks_once(axis):
    masks = [torch.ones(3), torch.ones(2), torch.zeros(4)]
    counts = get_step_counts({"loss_masks": masks, "step_row_counts": [2, 1], "prompt_counts": [1, 0, 1]})
    assert [(c.num_samples, c.num_prompts, c.num_tokens) for c in counts] == [(2, 1, 5), (1, 1, 0)]
    assert axis.seen == [(2, 3)]


@pytest.mark.parametrize(
    ("rollouts", "carried"),
    [
        # Five numbers of each of two steps.
        ({}, [(2, 5)]),
        # Where a rollout has several rows, the weight of each of two rollouts first.
        (
            {
                "rollout_counts": torch.tensor([1, 0, 1]),
                "rollout_mask_sums": torch.tensor([5, 5, 0]),
                "rollout_indices": torch.tensor([0, 0, 1]),
            },
            [(2,), (2, 5)],
        ),
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_what_is_said_of_all_steps_crosses_the_ranks_once(rollouts, carried, num_microbatches):
    dp, cp = CountingAxis(0, 2), CountingAxis(0, 1)
    set_parallel_state(ParallelState(intra_dp=dp, cp=cp))
    batch = {
        "tokens": [torch.ones(4), torch.ones(3), torch.ones(5)],
        "loss_masks": [torch.ones(3), torch.ones(2), torch.zeros(4)],
        "total_lengths": [4, 3, 5],
        "response_lengths": [3, 2, 4],
        "step_row_counts": [2, 1],
        "length_quarters": [3, 1, 3],
        **rollouts,
    }
    num_samples = 3 - len(rollouts) // 3
    counts = [StepCounts(num_samples - 1, 0, 5), StepCounts(1, 0, 0)]
    iterator = DataIterator(batch, [[0, 1]] * num_microbatches + [[2]], [counts[0]] * num_microbatches + counts[1:])
    described = describe_steps(mode_namespace("sample_mean"), batch, iterator, [num_microbatches, 1])
    assert [step["num_masked_samples"] for step in described] == [0, 1]
    assert dp.seen == carried
    # The weights of the rank's rows; an axis of one process passes them through.
    assert cp.seen == [(3,)]


@pytest.mark.parametrize("num_microbatches", [1, 7])
def test_all_metrics_of_a_step_cross_the_ranks_once(axis, num_microbatches):
    log = {"keys": ["loss", "kl"], "values": torch.tensor([3.0, 8.0]), "normalizers": torch.tensor([2, 4])}
    assert aggregate_train_losses([log] * num_microbatches) == {"loss": 1.5, "kl": 2.0}
    assert axis.seen == [(2, 2)]


def test_metrics_that_share_a_reducer_are_reduced_in_one_operation():
    """Two rows of 3 and 1 tokens, the second token masked, where a NaN stays out of its own metric and the others."""
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1])]
    mean, total = make_reducer(masks, denominators=torch.tensor([2, 1])), make_reducer(masks, denominators=1)
    first = torch.tensor([1.0, 5.0, 4.0, 7.0])
    columns = {
        "a": (mean, first),
        "b": (total, first),
        "c": (mean, first * torch.tensor([2.0, float("nan"), 2.0, 2.0])),
        "own": (lambda values: values.amax(), first),
        "d": (mean, -first),
    }
    reduce_together(columns)  # weights are built on first use
    with Operations() as passes:
        results = reduce_together(columns)
    assert {name: value.item() for name, value in results.items()} == {
        "a": 9.5,
        "b": 12.0,
        "c": 19.0,
        "own": 7.0,
        "d": -9.5,
    }
    assert list(results) == list(columns)
    # One for the token sum, and for the three means one, a look for NaN, and one more without it.
    assert passes.names.count("mul") == 3 and passes.names.count("stack") <= 1


def test_a_stack_keeps_gradients():
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], requires_grad=True)
    result = make_reducer([torch.tensor([1, 0, 1])], denominators=torch.tensor([2]))(values)
    (result * torch.tensor([1.0, 3.0])).sum().backward()
    assert result.tolist() == [2.5, 20.0]
    assert values.grad.tolist() == [[0.5, 0, 0.5], [1.5, 0, 1.5]]
