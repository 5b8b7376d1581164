"""Steps walked rank by rank to what is said of them, and what is to be said, by loops over exact fractions."""

from fractions import Fraction

import torch

from miles.backends.training_utils import data as data_room
from miles.backends.training_utils.step_totals import prepare_loss_terms
from miles.backends.training_utils.step_weights import describe_steps, token_weights
from miles.ray.rollout.train_data_conversion import process_rollout_data_shard, split_train_data_by_dp
from tests.fast import oracle
from tests.fast.backends.training_utils.harness import train_data_of
from tests.fast.backends.training_utils.layout import local_response

EXACT = 1e-12  # float64 sums of at most a few hundred terms

EXAMPLE = [
    oracle.Row.of([1] * 2, [0] * 2, group=0),
    oracle.Row.of([1] * 6, [0] * 6, group=0),
    oracle.Row.of([1], [0], group=1),
    oracle.Row.of([0, 0, 1], [0] * 3, group=1),
]
"""Two prompts with two answers each, of 2, 6, 1 and 1 active tokens; the longest is the second."""


def train_data(args, rows):
    """The rows with a ratio of 1 at kept tokens and e^-5 at rejected ones, so that icepop leaves `row.kept`."""
    data = train_data_of(args, rows)
    data["row_ids"] = list(range(len(rows)))
    data["rollout_log_probs"] = [[-2.0 + 5 * (1 - bit) for bit in row.kept_mask] for row in rows]
    if any(row.loss_weights is not None for row in rows):
        data["loss_weights"] = [[float(weight) for weight in row.token_weights] for row in rows]
    return data


def walk(args, rows, world):
    """What each rank says of the steps, and the token weights of its micro-batches by row and token."""
    shards = split_train_data_by_dp(args, train_data(args, rows), world.dp_size)

    def of_rank(rank):
        dp_rank, cp_rank = rank
        batch = data_room.move_to_device(process_rollout_data_shard(args, dict(shards[dp_rank])), "cpu")
        batch["log_probs"] = [torch.full_like(row, -2.0) for row in batch["rollout_log_probs"]]
        (iterator,), num_microbatches = data_room.get_data_iterator(args, None, batch)
        prepare_loss_terms(args, batch, [iterator], num_microbatches)
        described = describe_steps(args, batch, iterator, num_microbatches)
        weights = {}
        for _ in range(sum(num_microbatches)):
            micro_batch = iterator.get_next()
            places = [
                (row, t)
                for row in micro_batch["row_ids"]
                if row is not None
                for _, t in local_response(rows[row], cp_rank, world.cp_size)
            ]
            found = token_weights(args, micro_batch)
            assert found.dtype == torch.float64
            weights |= dict(zip(places, found.tolist(), strict=True))
        return described, weights

    return list(world.run(of_rank).values())


def expected_weights(args, rows, counting=oracle.DEFAULT):
    """The slopes of the fractions oracle, zero where there is no mean."""
    if args.loss_aggregation == "token_mean" and not sum(map(counting.total, rows)):
        return [[0.0] * row.response_length for row in rows]
    slopes = oracle.weights(rows, args.loss_aggregation, args.loss_aggregation_divisor, counting)
    return [[float(x) for x in row] for row in slopes]


def quarters_by_counting(lengths):
    """A sample is in the last quarter if those that are longer, or as long and later, are less than N / 4, ..."""
    quarters = []
    for place, length in enumerate(lengths):
        longer = sum((other, where) > (length, place) for where, other in enumerate(lengths))
        quarters.append(3 - next(k for k in range(4) if Fraction(longer, len(lengths)) < Fraction(k + 1, 4)))
    return quarters


def expected_description(args, rows, counting):
    """What is to be said of a step, by loops."""
    members = oracle.rollouts(rows)
    weights = expected_weights(args, rows, counting)
    samples = [sum(sum(weights[i]) for i in inside) for inside in members]
    quarters = quarters_by_counting([sum(rows[i].response_length for i in inside) for inside in members])
    total, squares = sum(samples), sum(w * w for w in samples)
    longest = sum(w for w, quarter in zip(samples, quarters, strict=True) if quarter == 3)
    return {
        "num_tokens": oracle.num_tokens(rows),
        "num_samples": len(members),
        "num_prompts": len(oracle.groups(rows)),
        "num_masked_samples": sum(not any(any(rows[i].mask) for i in inside) for inside in members),
        "effective_samples": total**2 / squares if squares else 0.0,
        "longest_quarter_weight": longest / total if total else 0.0,
    }
