"""How often values are walked through: by a reducer, and by the metrics of a whole policy loss."""

import pytest
import torch

from miles.backends.training_utils import loss_aggregation
from miles.backends.training_utils.loss_aggregation import make_reducer
from tests.fast.backends.training_utils.layout import mode_namespace
from tests.fast.backends.training_utils.loss.calls import call
from tests.fast.backends.training_utils.operations import Operations

MASKS = [torch.tensor([1, 0, 1] * 100), torch.tensor([1] * 50)]
DENOMINATORS = {"sample mean": torch.tensor([200, 50]), "token sum": 1.0}


@pytest.fixture(params=["cpu", "accelerator"])
def device(request, monkeypatch):
    """A CPU, and a device that must not be waited for, played by one."""
    if request.param == "accelerator":
        monkeypatch.setattr(loss_aggregation, "DEVICES_WITHOUT_WAIT", ())
    return request.param


FORWARD = {
    ("cpu", torch.float32): ["mul", "sum"],
    ("cpu", torch.bfloat16): ["mul", "sum"],
    # `ne` looks at the weights alone.
    ("accelerator", torch.float32): ["ne", "where", "dot"],
    ("accelerator", torch.bfloat16): ["ne", "where", "_to_copy", "dot"],
}
BACKWARD = {torch.float32: ["mul"], torch.bfloat16: ["mul", "_to_copy"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("denominators", DENOMINATORS.values(), ids=DENOMINATORS)
def test_a_metric_walks_twice_through_its_values_and_its_gradient_once(device, denominators, dtype):
    values = torch.linspace(-1, 1, 350).to(dtype).requires_grad_()
    reducer = make_reducer(MASKS, denominators=denominators)
    reducer(values)  # weights are built on first use
    for argument in (values, values.detach()):
        with Operations(least_size=350) as forward:
            result = reducer(argument)
        assert forward.names == FORWARD[device, dtype]
    loss = reducer(values)
    with Operations(least_size=350) as backward:
        loss.backward()
    assert backward.names == BACKWARD[dtype]
    assert result.dtype == torch.float32


@pytest.mark.parametrize("stacked", [False, True])
def test_bfloat16_values_are_added_up_in_float32_under_autocast_too(device, stacked):
    """4,096 times 1 + 1/128 is 4,128 with an exact sum; bfloat16 numbers there are 16 and 32 apart, float32 2^-11."""
    shape = (2, 4096) if stacked else (4096,)
    reducer = make_reducer([torch.ones(4096)], denominators=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        result = reducer(torch.full(shape, 1 + 1 / 128, dtype=torch.bfloat16))
        wide = reducer(torch.full(shape, 1.001))
    assert result.dtype == wide.dtype == torch.float32
    assert (result == 4096 + 32).all()
    # bfloat16 holds 4,096 and 4,112 there; a sequential float32 sum is off by some units of 2^-11.
    assert (wide - 4096 * 1.001).abs().max() < 0.05


def test_a_reducer_that_was_first_called_in_inference_mode_is_good_outside_of_it():
    reducer = make_reducer([torch.tensor([1, 0, 1])], denominators=torch.tensor([2]))
    values = torch.tensor([1.0, 5.0, 4.0])
    with torch.inference_mode():
        assert reducer(values).item() == 2.5
    leaf = values.clone().requires_grad_()
    reducer(leaf).backward()
    assert leaf.grad.tolist() == [0.5, 0, 0.5]


NUM_REDUCTIONS = {
    # The loss; the metrics of its sample mean, together.
    ("sample_mean", False): 2,
    # The loss; those of the sample mean; and the effective sample ratio, a token sum.
    ("token_mean", False): 3,
    ("prompt_mean", False): 2,
    # The loss and, over kept tokens, entropy; what is over kept tokens; what is over all.
    ("sample_mean", True): 3,
}


@pytest.mark.parametrize(("mode", "rejects"), NUM_REDUCTIONS)
def test_a_policy_loss_reduces_metrics_of_one_reducer_together(mode, rejects, monkeypatch):
    args = mode_namespace(mode, use_tis=rejects, tis_clip=1.05, tis_clip_low=0.95)
    args.tis_type = "icepop"
    sums, reduce = [], loss_aggregation._Weights.sum

    def noted(weights, values):
        sums.append(tuple(values.shape))
        return reduce(weights, values)

    monkeypatch.setattr(loss_aggregation._Weights, "sum", noted)
    call(args)
    assert len(sums) == NUM_REDUCTIONS[mode, rejects], sums


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", "constant"])
def test_the_metrics_of_a_policy_loss_look_at_no_row_by_itself(mode):
    """The looks of the CPU at sums are as many for one row as for five."""
    looks = []
    for indices in ((1,), (0, 1, 2, 3, 4)):
        with Operations() as counted:
            call(mode_namespace(mode), indices=indices)
        looks.append(counted.names.count("_local_scalar_dense"))
    assert looks[0] == looks[1]
