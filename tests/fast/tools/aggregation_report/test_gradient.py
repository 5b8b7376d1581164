"""What the report calls weight times advantage is the gradient of a real step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils.data import get_batch, get_data_iterator, move_to_device
from miles.backends.training_utils.loss import compute_advantages_and_returns, loss_function
from miles.backends.training_utils.loss_aggregation import MODES
from miles.backends.training_utils.parallel import get_parallel_state
from miles.backends.training_utils.step_totals import prepare_loss_terms
from miles.rollout.debug_data import load_rollout_dump
from miles.tools.aggregation_report.dumps import read_dump
from miles.tools.aggregation_report.weights import sample_weights
from miles.training_loop import make_shard
from miles.utils.arguments import parse_args
from tests.fast import oracle
from tests.fast.tools.aggregation_report.small_dumps import FIRST, GLOBAL_BATCH_SIZE, with_loss_weights, write_dumps
from tests.fast.tools.aggregation_report.test_options import arguments

VOCAB = 2
DIVISOR = 16.0


def step_gradients(path: str, mode: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield, for each row of the dump, its place and the gradient of the loss in each response token's log-prob.

    The training command's arguments, shard, micro-batches of two rows and loss. Logits of 0 give each of two tokens
    the probability p = 1/2, which is also the old policy's, so the ratio is 1; and d loss / d logit of the token that
    was sampled is (1 - p) d loss / d log-prob.
    """
    args = parse_args(
        [
            *(f"--loss-aggregation={mode}", "--prompt-groups=ragged", "--n-samples-per-prompt=3"),
            *(f"--global-batch-size={GLOBAL_BATCH_SIZE}", "--micro-batch-size=2", f"--load-debug-rollout-data={path}"),
            *([f"--loss-aggregation-divisor={DIVISOR}"] if mode == "constant" else []),
        ]
    )
    shard = make_shard(args, load_rollout_dump(path, 0), get_parallel_state().intra_dp, vocab_size=VOCAB)
    data = move_to_device(shard, "cpu")
    iterators, num_microbatches = get_data_iterator(args, None, data)
    data["log_probs"] = [torch.full((length,), 0.5).log() for length in data["response_lengths"]]
    compute_advantages_and_returns(args, data)
    prepare_loss_terms(args, data, iterators, num_microbatches)
    for _ in range(sum(num_microbatches)):
        batch = get_batch(iterators[0])
        logits = torch.zeros(1, batch["tokens"].numel(), VOCAB, requires_grad=True)
        loss, *_ = loss_function(args, batch, 1, logits)
        loss.backward()
        by_row = logits.grad[0].split(batch["total_lengths"])
        for place, tokens, length, grad in zip(
            batch["sample_indices"], batch["unconcat_tokens"], batch["response_lengths"], by_row, strict=True
        ):
            yield place, 2 * grad[-length - 1 : -1].gather(1, tokens[-length:, None])[:, 0]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("mode", oracle.MODES)
def test_the_gradient_of_a_real_step(tmp_path: Path, mode: str, is_weighted: bool) -> None:
    steps = with_loss_weights([FIRST])[0] if is_weighted else FIRST
    (path,) = write_dumps(tmp_path, [steps])
    args = arguments(path, f"--global-batch-size={GLOBAL_BATCH_SIZE}", "--prompt-groups=ragged")
    samples = sample_weights(args, [read_dump(args, Path(path), skip_bad=False)], divisor=DIVISOR)
    rows = [row for step in steps for row, _ in step]
    gradients = dict(step_gradients(path, mode))
    sample_of_row = [0, 1, 2, 1, 3, 4, 5, 6, 7]  # rows 1 and 3 are one rollout
    assert sorted(gradients) == list(range(len(rows)))
    sums = torch.zeros(8, dtype=torch.float64)
    for place, sample in enumerate(sample_of_row):
        sums[sample] += gradients[place].double().sum()
        if not is_weighted:
            gradient_weight = samples.token_weights[MODES[mode]][sample] * samples.advantages[sample]
            expected = torch.tensor([-gradient_weight.item() if bit else 0.0 for bit in rows[place].mask])
            assert torch.allclose(gradients[place], expected, rtol=1e-5, atol=1e-8)
    expected_sums = -samples.weights[MODES[mode]] * samples.advantages
    assert torch.allclose(sums, expected_sums, rtol=1e-5, atol=1e-7)
    assert expected_sums.abs().max() > 0.01
