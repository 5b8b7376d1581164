"""The losses that `--loss-type` names."""

from collections.abc import Callable

import torch

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.loss_hub.math_utils import (
    compute_approx_kl,
    compute_ess_ratio_contribution,
    get_log_probs_and_entropy,
)
from miles.utils.misc import load_function


def masked_tis_function(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    """Weigh each token, and leave out the first token of each response."""
    weight = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp().clamp(0, 2)
    masks = [torch.cat([mask[:1] * 0, mask[1:]]) for mask in loss_masks]
    return pg_loss * weight, masks, {"tis": weight}


def score(batch, logits: torch.Tensor):
    return get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )


def effective_sample_ratio(args, batch, ppo_kl: torch.Tensor):
    return compute_ess_ratio_contribution(
        ppo_kl=ppo_kl.detach(),
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        qkv_format=args.qkv_format,
        max_seq_lens=batch.get("max_seq_lens", None),
        calculate_per_token_loss=args.calculate_per_token_loss,
    )


def policy_loss_function(args, batch, logits: torch.Tensor, sum_of_sample_mean: Callable):
    total_lengths = batch["total_lengths"]
    response_lengths = batch["response_lengths"]
    max_seq_lens = batch.get("max_seq_lens", None)
    advantages = torch.cat(batch["advantages"])

    scores = score(batch, logits)
    log_probs = torch.cat(scores["log_probs"])
    ppo_kl = torch.cat(batch["rollout_log_probs"]) - log_probs
    pg_loss = -advantages * (-ppo_kl).exp()
    pg_clipfrac = (ppo_kl.abs() > 0.2).float()

    tis_metrics = {}
    if args.get_mismatch_metrics or args.use_tis:
        sum_of_sample_mean_for_mismatch_metrics = sum_of_sample_mean
        path = args.custom_tis_function_path
        tis_func = load_function(path) if path is not None else masked_tis_function
        pg_loss, modified_response_masks, tis_metrics = tis_func(
            args=args,
            pg_loss=pg_loss,
            train_log_probs=scores["log_probs"],
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
            total_lengths=total_lengths,
            response_lengths=response_lengths,
        )
        sum_of_sample_mean = get_sum_of_sample_mean(
            total_lengths,
            response_lengths,
            modified_response_masks,
            args.calculate_per_token_loss,
            args.qkv_format,
            max_seq_lens,
        )

    if args.custom_pg_loss_reducer_function_path is not None:
        factory = load_function(args.custom_pg_loss_reducer_function_path)
        pg_loss_masks = modified_response_masks if (args.get_mismatch_metrics or args.use_tis) else batch["loss_masks"]
        pg_loss_reducer = factory(total_lengths, response_lengths, pg_loss_masks, args.calculate_per_token_loss)
    else:
        pg_loss_reducer = sum_of_sample_mean

    ess_ratio_sum = effective_sample_ratio(args, batch, ppo_kl)
    pg_loss = pg_loss_reducer(pg_loss)
    pg_clipfrac = sum_of_sample_mean(pg_clipfrac)
    kl = sum_of_sample_mean(compute_approx_kl(log_probs, torch.cat(batch["rollout_log_probs"])))
    ppo_kl = sum_of_sample_mean(ppo_kl)
    entropy_loss = sum_of_sample_mean(torch.cat(scores["entropy"]))

    loss = pg_loss - args.entropy_coef * entropy_loss
    if args.use_kl_loss:
        loss = loss + args.kl_loss_coef * kl

    reported = {"loss": loss, "pg_loss": pg_loss, "entropy_loss": entropy_loss, "pg_clipfrac": pg_clipfrac}
    reported_loss = {name: value.clone().detach() for name, value in (reported | {"ppo_kl": ppo_kl}).items()}
    reported_loss["ess_ratio"] = ess_ratio_sum
    for name, value in tis_metrics.items():
        reported_loss[name] = sum_of_sample_mean_for_mismatch_metrics(value).detach()
    return loss, reported_loss


def sft_loss_function(args, batch, logits: torch.Tensor, sum_of_sample_mean: Callable):
    scores = score(batch, logits)
    loss = -sum_of_sample_mean(torch.cat(scores["log_probs"]))
    return loss, {"loss": loss.clone().detach()}


def get_loss_function(args):
    return {"policy_loss": policy_loss_function, "sft_loss": sft_loss_function}[args.loss_type]
