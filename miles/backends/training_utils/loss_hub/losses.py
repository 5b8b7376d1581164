"""The losses that `loss_function` dispatches to: each turns logits into a local sum and local metric sums.

A loss function takes `(args, batch, logits, sum_of_sample_mean)` and returns `(loss, metrics)`: a scalar with gradient
that the caller divides by the step's normalizer, and detached scalars. `sum_of_sample_mean` is the default reducer of
the dispatcher. Metrics in a plain dict share that reducer's normalizer; a `MetricDict` says otherwise key by key.

Shapes: B rows, T_i response tokens of row i on this rank, T = sum_i T_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from miles.backends.training_utils.loss_aggregation import LossAggregation, Reducer, concat
from miles.backends.training_utils.loss_hub.corrections import (
    corrects_off_policy,
    may_reject,
    run_correction,
    step_masks,
)
from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy, get_values
from miles.backends.training_utils.loss_hub.math_utils import compute_approx_kl, compute_policy_loss, safe_exp
from miles.backends.training_utils.loss_hub.pg_loss_reducer import PolicyReducers, reduce_together
from miles.backends.training_utils.loss_hub.pg_loss_reducer import get_pg_loss_reducer as get_pg_loss_reducer  # seam
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.backends.training_utils.loss_term import MetricDict
from miles.utils.misc import load_function
from miles.utils.options import Options
from miles.utils.types import RolloutBatch

LossFunction = Callable[[Options, RolloutBatch, torch.Tensor, Reducer], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def policy_loss_function(
    args: Options,
    batch: RolloutBatch,
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy-gradient loss (GRPO, GSPO, REINFORCE with baseline) with optional entropy, KL and IS terms.

    loss = R(pg) - entropy_coef * S(entropy) + kl_loss_coef * S(kl), where R is the reducer of the aggregation mode
    and S the sample mean, or R too with `aux_loss_aggregation` "match".

    Args:
        args: `eps_clip`, `eps_clip_high`, `eps_clip_c`, `entropy_coef`, `use_kl_loss`, `use_tis`, ...
        batch: "unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages", "log_probs" (or
            "rollout_log_probs" under `use_rollout_logprobs`), "ref_log_probs" with `use_kl_loss`.
        logits: `[1, T_all, V]` or `[B, S, V]`.
        sum_of_sample_mean: The dispatcher's reducer: the sample mean, except under `token_mean`.

    Returns:
        The loss and "loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "ess_ratio", and what the optional
        terms add. Under `token_mean`, "loss" and "pg_loss" (with "match" also entropy and KL) are sums over the tokens
        that the term counts, "ess_ratio" is a sum over active tokens, and the rest are sums over samples.

    Raises:
        ValueError: a column that the configuration needs is missing.
    """
    args = Options.of(args)
    responses = Responses(args, batch)
    log_probs, entropy = _score(responses, logits, entropy_requires_grad=args.entropy_coef != 0)
    old = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    old_log_probs = responses.column(old, needed_for="policy loss")
    ppo_kl = old_log_probs - log_probs
    if args.advantage_estimator == "gspo":
        ppo_kl = responses.sequence_mean(ppo_kl)
    pg_loss, pg_clipfrac = compute_policy_loss(
        ppo_kl,
        responses.column("advantages", needed_for="policy loss"),
        args.eps_clip,
        args.eps_clip_high,
        args.eps_clip_c,
    )
    pg_loss, mismatch, masks = _correct_off_policy(responses, pg_loss, ppo_kl)
    reduce = PolicyReducers.of(responses, masks, sum_of_sample_mean)
    terms = {"pg_loss": reduce.pg(pg_loss)}
    loss = terms["pg_loss"]
    logged = {}
    auxiliary = {"entropy_loss": (-args.entropy_coef, entropy)}
    if args.use_kl_loss:
        auxiliary["kl_loss"] = args.kl_loss_coef, _kl_to_reference(responses, log_probs, old_log_probs)
    for name, (coefficient, values) in auxiliary.items():
        if coefficient != 0:
            terms[name] = reduce.auxiliary(values)
            loss = loss + coefficient * terms[name]
        else:
            logged[name] = reduce.auxiliary, values
    logged |= {"pg_clipfrac": (reduce.kept, pg_clipfrac), "ppo_kl": (reduce.kept, ppo_kl)}
    logged |= {name: (reduce.whole, values) for name, values in mismatch.items()}
    logged["ess_ratio"] = reduce.whole_like_mode, _effective_sample_ratio(responses, ppo_kl.detach())
    metrics = reduce_together({name: (reducer, values.detach()) for name, (reducer, values) in logged.items()})
    metrics = {name: value.detach() for name, value in {"loss": loss, **terms}.items()} | metrics
    return loss, MetricDict(metrics, _units(args))


def _score(
    responses: Responses, logits: torch.Tensor, *, entropy_requires_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of the response tokens, `[T]` each, 0 at masked positions."""
    batch = responses.batch
    scored = get_log_probs_and_entropy(
        logits,
        args=responses.args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        entropy_requires_grad=entropy_requires_grad,
        max_seq_lens=batch.get("max_seq_lens"),
        loss_masks=batch["loss_masks"],
    )
    return concat(scored["log_probs"]), concat(scored["entropy"])


def _correct_off_policy(
    responses: Responses, pg_loss: torch.Tensor, ppo_kl: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Sequence[torch.Tensor]]:
    """Apply the correction; return the loss, the per-token mismatch metrics, and the whole-response masks left."""
    args, batch = responses.args, responses.batch
    metrics: dict[str, torch.Tensor] = {}
    if None not in (batch.get("rollout_log_probs"), batch.get("log_probs")):
        rollout, train = (
            responses.column(key, needed_for="mismatch metrics") for key in ("rollout_log_probs", "log_probs")
        )
        metrics["train_rollout_logprob_abs_diff"] = (train - rollout).abs()
        metrics["train_rollout_kl"] = compute_approx_kl(rollout, train, "low_var_kl")
    if not corrects_off_policy(args):
        return pg_loss, metrics, batch["loss_masks"]
    corrected, local_masks, correction_metrics = run_correction(responses, pg_loss)
    metrics["ois"] = safe_exp(-ppo_kl).detach()
    masks = batch["loss_masks"]
    if may_reject(args):
        masks = step_masks(responses, local_masks)
    return corrected, {**metrics, **correction_metrics}, masks


def _kl_to_reference(responses: Responses, log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    reference = responses.column("ref_log_probs", needed_for="--use-kl-loss")
    ratio = safe_exp(log_probs - old_log_probs) if responses.args.use_unbiased_kl else None
    return compute_approx_kl(log_probs, reference, responses.args.kl_loss_type, importance_ratio=ratio)


def _units(args: Options) -> dict[str, Literal["tokens", "term"]]:
    """Return which metrics of the policy loss are not sums over samples: some under `token_mean`, else none."""
    if not LossAggregation.of(args).counts_tokens:
        return {}
    of_term = ("loss", "pg_loss", *(("entropy_loss", "kl_loss") if args.aux_loss_aggregation == "match" else ()))
    return {**dict.fromkeys(of_term, "term"), "ess_ratio": "tokens"}


def _effective_sample_ratio(responses: Responses, ppo_kl: torch.Tensor) -> torch.Tensor:
    """Return (sum_t w)^2 / (m_i sum_t w^2) of each row on each of its tokens `[T]`, w = pi / pi_old.

    1 is on-policy; 1 / m_i means that one token carries all the weight.
    """
    weights = safe_exp(-ppo_kl)
    mean = responses.sequence_mean(weights)
    return mean.square() / responses.sequence_mean(weights.square()).clamp_min(torch.finfo(weights.dtype).tiny)


def value_loss_function(
    args: Options,
    batch: RolloutBatch,
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped value loss: max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2).

    Args:
        args: Reads `value_clip`.
        batch: "values" (old predictions) and "returns", B rows `[T_i]`, besides tokens, lengths and masks.
        logits: Value head output `[1, T_all, 1]` or `[B, S, 1]`.
        sum_of_sample_mean: The dispatcher's reducer; the token sum when per-token loss is on.

    Returns:
        The loss, and "value_loss" and "value_clipfrac", all reduced alike.

    Reference:
        PPO2 value clipping, as in the host.
    """
    responses = Responses(Options.of(args), batch)
    predicted = get_values(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        max_seq_lens=batch.get("max_seq_lens"),
    )
    values = responses.clean(concat(predicted["values"]))
    old_values = responses.column("values", needed_for="value loss")
    returns = responses.column("returns", needed_for="value loss")
    clipped = old_values + (values - old_values).clamp(-args.value_clip, args.value_clip)
    loss = sum_of_sample_mean(torch.maximum((clipped - returns).square(), (values - returns).square()))
    clipfrac = sum_of_sample_mean(((values - old_values).abs() > args.value_clip).float())
    return loss, {"value_loss": loss.detach(), "value_clipfrac": clipfrac.detach()}


def sft_loss_function(
    args: Options,
    batch: RolloutBatch,
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the response tokens, nats.

    Args:
        args: Reads `rollout_temperature` and `qkv_format`.
        batch: "unconcat_tokens", "total_lengths", "response_lengths", "loss_masks".
        logits: `[1, T_all, V]` or `[B, S, V]`.
        sum_of_sample_mean: The dispatcher's reducer; the token sum when per-token loss is on.

    Returns:
        The loss, and "loss".
    """
    log_probs, _ = _score(Responses(Options.of(args), batch), logits)
    loss = -sum_of_sample_mean(log_probs)
    return loss, {"loss": loss.detach()}


def get_loss_function(args: Options) -> LossFunction:
    """Return the function of `args.loss_type`.

    Raises:
        ValueError: unknown loss type.
        UserError: the custom loss does not import.
    """
    built_in = {
        "policy_loss": policy_loss_function,
        "value_loss": value_loss_function,
        "sft_loss": sft_loss_function,
    }
    if args.loss_type == "custom_loss":
        custom: LossFunction = load_function(str(args.custom_loss_function_path))
        return custom
    if args.loss_type not in built_in:
        allowed = ", ".join([*built_in, "custom_loss"])
        raise ValueError(f"unknown loss type {args.loss_type!r}; choose one of {allowed}")
    return built_in[args.loss_type]
