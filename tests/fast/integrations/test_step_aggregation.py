"""A step in any loop: value and gradient are those of the definition, in every layout and under every split."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import miles
from miles import MODES, StepAggregation
from miles.utils.errors import UserError
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks, run_ranks_to_errors
from tests.fast.integrations.steps import DIVISOR, ROWS, token_weights, value_of

MASKS = [torch.tensor(row.mask) for row in ROWS]
LOSSES = [torch.tensor(row.losses, dtype=torch.float64) for row in ROWS]
WEIGHTS = [torch.tensor(row.weights) for row in ROWS]
PROMPTS = [row.prompt for row in ROWS]
SPLITS = [[slice(None)], [slice(0, 3), slice(3, 7)], [[6, 0], [1], [5, 2, 4], [3]]]


def padded(rows, length=7):
    """`[B, length]`: what is beyond a row's end is NaN, in a mask 0."""
    filler = float("nan") if rows[0].is_floating_point() else 0
    return torch.stack([torch.cat([row, row.new_full((length - len(row),), filler)]) for row in rows])


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


LAYOUTS = {"packed": (list, torch.cat), "padded": (padded, padded), "nested": (nested, nested)}


def of(mode, masks=MASKS, **options):
    divisor = {"divisor": DIVISOR} if mode == "constant" else {}
    return StepAggregation.of(mode, masks, **{"prompt_ids": PROMPTS, **divisor, **options})


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_value_and_gradient(mode, layout, split):
    of_masks, of_values = LAYOUTS[layout]
    step = of(mode, of_masks(MASKS))
    expected = token_weights(mode)
    losses = [row.clone().requires_grad_() for row in LOSSES]
    total = 0.0
    for rows in split:
        values = of_values(losses[rows] if isinstance(rows, slice) else [losses[row] for row in rows])
        share = step.reducer(rows)(values)
        share.backward()
        total += share.item()
    assert total == pytest.approx(float(value_of(expected)), rel=1e-14)
    for row, weights in zip(losses, expected, strict=True):
        assert row.grad.tolist() == pytest.approx([float(weight) for weight in weights], rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_rows_and_tokens(mode):
    expected = token_weights(mode)
    step = of(mode)
    for row, (found, weights) in enumerate(zip(step.token_weights, expected, strict=True)):
        assert found.tolist() == pytest.approx([float(weight) for weight in weights], rel=1e-14)
        if any(ROWS[row].mask):
            assert step.row_weights[row].item() == pytest.approx(float(max(weights)), rel=1e-14)
    assert (step.counts.num_samples, step.counts.num_prompts, step.counts.num_tokens) == (7, 4, 16)
    by_padding = of(mode, padded(MASKS)).token_weights
    assert by_padding.shape == (7, 7) and by_padding[2, :5].tolist() == step.token_weights[2].tolist()
    losses = nested(LOSSES)
    jagged = of(mode, torch.nested.nested_tensor_from_jagged(torch.cat(MASKS), losses.offsets())).token_weights
    assert (jagged * losses).values().sum().item() == pytest.approx(float(value_of(expected)), rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_of_tokens_are_enough(mode):
    counts = [sum(row.mask) for row in ROWS]
    for given in (counts, torch.tensor(counts)):
        step = of(mode, given)
        assert step.row_weights.tolist() == of(mode).row_weights.tolist()
        # The micro-batch has other padding than the step would have.
        total = sum(
            step.reducer(slice(i, i + 1), padded(MASKS[i : i + 1]))(padded(LOSSES[i : i + 1])).item() for i in range(7)
        )
        assert total == pytest.approx(float(value_of(token_weights(mode))), rel=1e-14)
    with pytest.raises(UserError, match="masks="):
        step.reducer()
    with pytest.raises(UserError, match="no token weights"):
        _ = step.token_weights
    with pytest.raises(UserError, match=r"have \[1\] active tokens, .* counted with \[2\]"):
        step.reducer([0], [MASKS[3]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_loss_weights_and_samples_of_several_rows(mode, layout):
    of_masks, of_values = LAYOUTS[layout]
    samples = [row.sample for row in ROWS]
    step = of(mode, of_masks(MASKS), loss_weights=of_masks(WEIGHTS), sample_ids=samples)
    expected = token_weights(mode, weighted=True, samples=True)
    total = sum(step.reducer(rows)(of_values(LOSSES[rows])).item() for rows in SPLITS[1])
    assert total == pytest.approx(float(value_of(expected)), rel=1e-12)
    assert step.counts.num_samples == 6


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_several_columns_at_once(layout):
    of_masks, of_values = LAYOUTS[layout]
    step = of("prompt_mean", of_masks(MASKS), loss_weights=of_masks(WEIGHTS))
    columns = [of_values(LOSSES), of_values([row.square() for row in LOSSES])]
    reduce = step.reducer()
    assert reduce(torch.stack(columns)).tolist() == pytest.approx([reduce(column).item() for column in columns])


def rank_rows(rank):
    """Uneven: rank 0 has five rows, rank 1 has two, rank 2 none; prompts a and c lie on two ranks."""
    return [[0, 1, 2, 3, 6], [4, 5], []][rank]


class Scores(torch.nn.Module):
    """A loss for each token: its number times a weight, so that the gradient is the sum of weight times number."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, values):
        return values * self.weight


def ddp_step(mode):
    """Gradient, and the sum over micro-batches and ranks of the shares."""
    dist.init_process_group("gloo")
    own = rank_rows(dist.get_rank())
    step = of(mode, [MASKS[row] for row in own], prompt_ids=[PROMPTS[row] for row in own])
    model = DistributedDataParallel(Scores())
    shares = []
    for start in range(0, max(len(own), 1), 2):
        rows = range(start, min(start + 2, len(own)))
        with model.no_sync() if start + 2 < len(own) else nullcontext():
            values = torch.cat([torch.zeros(0, dtype=torch.float64), *(LOSSES[own[row]] for row in rows)])
            share = step.reducer(list(rows))(model(values))
            share.backward()
            shares.append(share.detach())
    total = torch.stack(shares).sum() / dist.get_world_size()
    dist.all_reduce(total)
    gradient = model.module.weight.grad.item()
    del model  # a DDP module that outlives its group may hang: it ends the group's threads while it holds the GIL
    dist.destroy_process_group()
    return total.item(), gradient, step.counts


@pytest.mark.parametrize("mode", MODES)
def test_uneven_ranks_and_one_without_rows(mode):
    expected = float(value_of(token_weights(mode)))
    for value, gradient, counts in run_ranks(lambda: ddp_step(mode), 3):
        assert value == pytest.approx(expected, rel=1e-14)
        assert gradient == pytest.approx(expected, rel=1e-14)  # the loss is linear in the weight, which is 1
        assert counts == miles.StepCounts(7, 4, 16)


def test_a_framework_that_divides_by_more():
    by_default, by_four = of("token_mean"), of("token_mean", gradient_divisor=4)
    assert torch.equal(4 * by_default.row_weights, by_four.row_weights)


BAD = {
    "no such mode": ({"mode": "prompt"}, "Unknown --loss-aggregation mode 'prompt'.*did you mean"),
    "no divisor": ({"mode": "constant", "divisor": None}, "constant needs --loss-aggregation-divisor"),
    "a divisor for nothing": ({"divisor": 3.0}, "belongs to --loss-aggregation constant; got 3.0 with prompt_mean"),
    "no prompts": ({"prompt_ids": None}, "prompt_mean needs prompt_ids, the prompt of each of the 7 rows"),
    "too few prompts": ({"prompt_ids": ["a"]}, "prompt_ids needs one entry for each of 7 rows; got 1"),
    "a prompt that is none": ({"prompt_ids": [None, *PROMPTS[1:]]}, "prompt_ids takes integers.*row 0 has None"),
    "a prompt that is a number": ({"prompt_ids": torch.arange(7) / 2}, "row 0 has 0.0 \\(float\\)"),
    "groups of other sizes": ({"samples_per_prompt": 2}, "samples_per_prompt=2, and 3 of 4 prompts.*'a' with 3"),
    "a sample of two prompts": (
        {"sample_ids": [0, 0, 1, 2, 3, 4, 5]},
        "sample 0 has rows of two prompts, 'a' and 'b'",
    ),
    "zero samples": ({"samples_per_prompt": 0}, "samples_per_prompt must be a positive integer; got 0"),
    "a mask of halves": ({"rows": [mask / 2 for mask in MASKS]}, "a mask has a value other than 0 and 1"),
    "a text": ({"rows": "rows"}, "these are no masks: 'rows' .*; give masks, as a list"),
    "a negative number": ({"rows": [1, -1]}, "numbers of tokens must not be negative"),
    "negative weights": ({"loss_weights": [-weights for weights in WEIGHTS]}, "finite and not negative"),
    "weights of other rows": ({"loss_weights": WEIGHTS[1:]}, r"loss weights need the layout of the masks"),
    "no rows": ({"rows": [], "prompt_ids": []}, "no rows on any rank"),
    "no tokens": ({"mode": "token_mean", "rows": [0] * 7}, "token_mean needs at least one active token"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error(name):
    options, message = BAD[name]
    options = {"mode": "prompt_mean", "rows": MASKS, **options}
    with pytest.raises(ValueError, match=message):
        of(options.pop("mode"), options.pop("rows"), **options)


def test_values_in_another_layout_are_an_error():
    for masks, values in [(MASKS, padded(LOSSES)), (padded(MASKS), torch.cat(LOSSES)), (nested(MASKS), LOSSES[:6])]:
        with pytest.raises(UserError, match="values need the layout of the masks"):
            of("prompt_mean", masks).reducer()(values)


def _on_a_rank(bad_rank, good, bad):
    dist.init_process_group("gloo")
    try:
        options = {"mode": "prompt_mean", "rows": MASKS, "prompt_ids": PROMPTS, **good}
        options |= bad if dist.get_rank() == bad_rank else {}
        StepAggregation.of(options.pop("mode"), options.pop("rows"), **options)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_ids": [None] * 7}, "row 0 has None"),
        ({"mode": "sample_mean"}, "every rank must give the same mode; rank 0 gave 'prompt_mean', rank 1 gave 's"),
        (
            {"rows": [1] * 8, "prompt_ids": ["a"] * 8, "samples_per_prompt": 3},
            "every rank must give the same samples_",
        ),
    ],
)
def test_what_is_wrong_on_one_rank_stops_every_rank(bad, message):
    for error in run_ranks_to_errors(lambda: _on_a_rank(1, {}, bad), 2):
        assert isinstance(error, UserError) and message in str(error)


def test_prompts_on_one_rank_alone_stop_every_rank():
    good = {"mode": "sample_mean"}
    for error in run_ranks_to_errors(lambda: _on_a_rank(0, good, {"prompt_ids": None}), 2):
        assert isinstance(error, UserError) and "some ranks gave prompt_ids and some did not" in str(error)


def test_the_divisor_is_the_one_of_the_test():
    assert of("constant").denominators.tolist() == [DIVISOR] * 7
