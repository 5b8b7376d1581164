"""Two real context-parallel ranks (gloo, forked) against the naive walk: what one process cannot slice and sum.

GSPO's ratio and the effective sample ratio need a row's sum over both ranks before anything nonlinear.
"""

import pytest
import torch
import torch.distributed as dist

from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from tests.fast.backends.training_utils.layout import chunk_positions, local_response
from tests.fast.backends.training_utils.loss.inputs import COLUMNS, ROWS, VOCAB, Step, micro_batch
from tests.fast.backends.training_utils.loss.test_loss_snapshot import naive, namespace

CP_SIZE = 2
NAMES = [
    *[f"grpo/{mode}" for mode in ("sample_mean", "prompt_mean", "token_mean", "constant")],
    *[f"gspo/{mode}" for mode in ("sample_mean", "prompt_mean", "token_mean", "constant")],
    "kl-k3/prompt_mean",
    "tis/token_mean",
    "value/token_mean",
    "sft/sample_mean",
]
MICRO_BATCHES = [[0, 3, 5], [1], [2, 4]]


def local_micro_batch(args, step, indices, cp_rank):
    """This rank's share of the micro-batch: columns at its response tokens, logits at its zigzag positions."""
    batch, leaves = micro_batch(args, step, indices)
    pieces = []
    for position, i in enumerate(indices):
        kept = [t for _, t in local_response(ROWS[i], cp_rank, CP_SIZE)]
        for name in COLUMNS:
            batch[name][position] = batch[name][position][kept]
        for p in chunk_positions(ROWS[i].total_length, cp_rank, CP_SIZE):
            pieces.append(torch.full_like(leaves[i][0], float("nan")) if p is None else leaves[i][p])
    return batch, leaves, torch.stack(pieces)[None]


def one_configuration(name, megatron, cp_rank):
    args, step = namespace(name), Step()
    total, normalizers, logs = 0.0, 0, []
    width = 1 if args.loss_type == "value_loss" else VOCAB
    gradient = [torch.zeros(row.total_length, width, dtype=torch.float64) for row in ROWS]
    for indices in MICRO_BATCHES:
        batch, leaves, logits = local_micro_batch(args, step, indices, cp_rank)
        loss, normalizer, log = loss_function(args, batch, len(MICRO_BATCHES), logits, megatron)
        if megatron and not args.calculate_per_token_loss:
            loss = loss / len(MICRO_BATCHES)
        loss.backward()
        total += loss.item()
        normalizers += int(normalizer)
        logs.append(log)
        for i, leaf in leaves.items():
            gradient[i] += leaf.grad.double()
    return total, normalizers, gradient, aggregate_train_losses(logs)


def worker(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", CP_SIZE), rank=rank, world_size=CP_SIZE)
    axis = GroupInfo(rank, CP_SIZE, dist.group.WORLD)
    set_parallel_state(ParallelState(intra_dp_cp=axis, cp=axis))
    results = {
        (name, megatron): one_configuration(name, megatron, rank) for name in NAMES for megatron in (False, True)
    }
    torch.save(results, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cp")
    torch.multiprocessing.start_processes(worker, (str(directory),), nprocs=CP_SIZE, start_method="fork")
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(CP_SIZE)]


@pytest.mark.parametrize("megatron", [False, True], ids=["summed", "megatron"])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one(name, megatron, results):
    (total_0, count_0, gradient_0, metrics_0), (total_1, count_1, gradient_1, metrics_1) = (
        rank[(name, megatron)] for rank in results
    )
    divisor = 1
    if megatron:
        divisor = count_0 + count_1 if name.endswith("token_mean") else CP_SIZE
    value, gradient, metrics = naive(name)
    assert metrics_0 == metrics_1 == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert (total_0 + total_1) / divisor == pytest.approx(value, rel=1e-5, abs=1e-6)
    for mine, yours, right in zip(gradient_0, gradient_1, gradient, strict=True):
        assert ((mine + yours) / divisor - right).abs().max() < 1e-6


def test_a_row_is_spread_over_both_ranks(results):
    """Row 4's eight tokens in chunks of two: rank 0 predicts its last response token, rank 1 the others."""
    gradients = [rank[("sft/sample_mean", False)][2][4] for rank in results]
    positions = [gradient.abs().amax(-1).nonzero().flatten().tolist() for gradient in gradients]
    assert positions == [[6], [2, 3, 4]]
