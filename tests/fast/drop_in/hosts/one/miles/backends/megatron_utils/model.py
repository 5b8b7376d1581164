"""Megatron's training step."""

from functools import partial

from miles.backends.megatron_utils.schedules import forward_backward
from miles.backends.training_utils.data import get_batch
from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss import loss_function


def forward_only(args, model, data_iterator, num_microbatches):
    """Return the outputs of a rollout's micro-batches."""
    outputs = []
    for _ in range(sum(num_microbatches)):
        batch = get_batch(data_iterator, ["tokens", "loss_masks", "total_lengths", "response_lengths"])
        outputs.append(model(batch["tokens"]).detach())
    return outputs


def train_one_step(args, data_iterator, model, optimizer, num_microbatches):
    """Train on the step's micro-batches, and return what is logged."""
    optimizer.zero_grad()

    def forward_step(data_iterator, model):
        batch = get_batch(
            data_iterator,
            [
                "tokens",
                "total_lengths",
                "response_lengths",
                "loss_masks",
                "advantages",
                "returns",
                "rollout_log_probs",
                "max_seq_lens",
            ],
            args.qkv_format,
        )
        output_tensor = model(batch["tokens"])
        return output_tensor, partial(loss_function, args, batch, num_microbatches, apply_megatron_loss_scaling=True)

    losses_reduced = forward_backward(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        calculate_per_token_loss=args.calculate_per_token_loss,
    )
    optimizer.step()
    return aggregate_train_losses(losses_reduced)
