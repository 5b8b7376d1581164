"""Losses, and what Megatron differentiates and logs of them."""

import torch
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils import mpu
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean, local_positions, slice_log_prob_with_cp
from slime.utils.misc import load_function


def get_log_probs_and_entropy(logits, batch):
    log_probs, entropy, start = [], [], 0
    rows = zip(batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True)
    for tokens, total_length, response_length in rows:
        positions = local_positions(total_length)
        prompt = total_length - response_length
        targets = slice_log_prob_with_cp(list(range(prompt, total_length)), total_length, response_length)
        here = [start + positions.index(target - 1) for target in targets]
        start += len(positions)
        table = torch.log_softmax(logits[here], dim=-1)
        log_probs.append(table.gather(1, tokens[targets].unsqueeze(1)).squeeze(1))
        entropy.append(-(table.exp() * table).sum(-1))
    return torch.cat(log_probs), torch.cat(entropy)


def masked_tis_function(*, pg_loss, loss_masks, **_):
    """Leave out the first token of each response."""
    return pg_loss, [torch.cat([mask[:1] * 0, mask[1:]]) for mask in loss_masks], {}


def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    total_lengths = batch["total_lengths"]
    response_lengths = batch["response_lengths"]
    log_probs, entropy = get_log_probs_and_entropy(logits, batch)
    ppo_kl = torch.cat(batch["rollout_log_probs"]) - log_probs
    pg_loss = -torch.cat(batch["advantages"]) * (-ppo_kl).exp()

    if args.get_mismatch_metrics or args.use_tis:
        pg_loss, modified_response_masks, _ = masked_tis_function(
            pg_loss=pg_loss,
            loss_masks=batch["loss_masks"],
        )
        sum_of_sample_mean = get_sum_of_sample_mean(
            total_lengths,
            response_lengths,
            modified_response_masks,
            batch["rollout_mask_sums"],
            args.calculate_per_token_loss,
        )

    if getattr(args, "custom_pg_loss_reducer_function_path", None) is not None:
        factory = load_function(args.custom_pg_loss_reducer_function_path)
        pg_loss_masks = modified_response_masks if (args.get_mismatch_metrics or args.use_tis) else batch["loss_masks"]
        pg_loss_reducer = factory(total_lengths, response_lengths, pg_loss_masks, args.calculate_per_token_loss)
    else:
        pg_loss_reducer = sum_of_sample_mean

    pg_loss = pg_loss_reducer(pg_loss)
    pg_clipfrac = sum_of_sample_mean((ppo_kl.abs() > 0.2).float())
    ppo_kl = sum_of_sample_mean(ppo_kl)
    entropy_loss = sum_of_sample_mean(entropy)
    loss = pg_loss - args.entropy_coef * entropy_loss

    reported_loss = {
        "loss": loss.clone().detach(),
        "pg_loss": pg_loss.clone().detach(),
        "entropy_loss": entropy_loss.clone().detach(),
        "pg_clipfrac": pg_clipfrac.clone().detach(),
        "ppo_kl": ppo_kl.clone().detach(),
    }
    return loss, reported_loss


def sft_loss_function(args, batch, logits, sum_of_sample_mean):
    log_probs, _ = get_log_probs_and_entropy(logits, batch)
    loss = -sum_of_sample_mean(log_probs)
    return loss, {"loss": loss.clone().detach()}


def loss_function(args, batch, num_microbatches, step_global_batch_size, logits):
    num_tokens = sum([torch.clamp_min(mask.sum(), 1) for mask in batch["loss_masks"]])

    sum_of_sample_mean = get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        batch["rollout_mask_sums"],
        args.calculate_per_token_loss,
    )

    match args.loss_type:
        case "policy_loss":
            func = policy_loss_function
        case "sft_loss":
            func = sft_loss_function
        case _:
            raise ValueError(f"Unknown loss type: {args.loss_type}")

    if args.recompute_loss_function:
        loss, log = checkpoint(func, args, batch, logits, sum_of_sample_mean, use_reentrant=False)
    else:
        loss, log = func(args, batch, logits, sum_of_sample_mean)

    if args.calculate_per_token_loss:
        loss = loss * mpu.get_context_parallel_world_size()
    else:
        dp_cp = mpu.get_data_parallel_world_size(with_context_parallel=True)
        loss = loss * num_microbatches / step_global_batch_size * dp_cp

    return (
        loss,
        (num_tokens if args.calculate_per_token_loss else torch.tensor(1, device=logits.device)),
        {
            "keys": list(log.keys()),
            # The count of a step's rollouts comes from the schedule, so that a micro-batch has none to add.
            "values": torch.tensor(
                [
                    num_tokens if args.calculate_per_token_loss else 0,
                    *log.values(),
                ],
                device=logits.device,
            ),
        },
    )
