"""One call of `loss_function` on a micro-batch of the deterministic inputs."""

from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.parallel import set_parallel_state
from tests.fast.backends.training_utils.layout import simulated_state
from tests.fast.backends.training_utils.loss.inputs import VOCAB, Step, micro_batch, packed


def call(args, indices=(0, 3, 5), num_microbatches=2, megatron=False, step=None, change=None, dp_size=2):
    """Return loss, normalizer, log, leaves and logits; `change` edits the batch and may return other logits."""
    set_parallel_state(simulated_state(dp_size, 1))
    batch, leaves = micro_batch(args, step or Step(), indices)
    logits = packed(leaves, 1 if args.loss_type == "value_loss" else VOCAB)
    if change is not None:
        changed = change(batch, leaves, logits)
        logits = logits if changed is None else changed
    loss, normalizer, log = loss_function(args, batch, num_microbatches, logits, megatron)
    return loss, normalizer, log, leaves, logits
