"""The losses that `loss_function` dispatches to: each turns logits into a local sum and local metric sums.

A loss function takes `(args, batch, logits, sum_of_sample_mean)` and returns `(loss, metrics)`: a scalar with gradient
that the caller divides by the step's normalizer, and detached scalars. `sum_of_sample_mean` is the default reducer of
the dispatcher. Metrics in a plain dict share that reducer's normalizer; a `MetricDict` says otherwise key by key.

Shapes: B rows, T_i response tokens of row i on this rank, T = sum_i T_i.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

import torch

from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
from miles.backends.training_utils.loss_aggregation import LossAggregation, MetricDict, Reducer, concat
from miles.backends.training_utils.loss_hub.corrections import check_correction, vanilla_tis_function
from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy, get_values
from miles.backends.training_utils.loss_hub.math_utils import compute_approx_kl, compute_policy_loss, safe_exp
from miles.backends.training_utils.loss_hub.pg_loss_reducer import get_pg_loss_reducer
from miles.backends.training_utils.loss_hub.responses import Responses
from miles.utils.misc import load_function
from miles.utils.types import RolloutBatch

LossFunction = Callable[[Namespace, RolloutBatch, torch.Tensor, Reducer], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def policy_loss_function(
    args: Namespace,
    batch: RolloutBatch,
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy-gradient loss (GRPO, GSPO, REINFORCE with baseline) with optional entropy, KL and IS terms.

    loss = R(pg) - entropy_coef * S(entropy) + kl_loss_coef * S(kl), where R is the reducer of the aggregation mode
    and S the sample mean, whatever the mode.

    Args:
        args: `eps_clip`, `eps_clip_high`, `eps_clip_c`, `entropy_coef`, `use_kl_loss`, `use_tis`, ...
        batch: "unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages", "log_probs" (or
            "rollout_log_probs" under `use_rollout_logprobs`), "ref_log_probs" with `use_kl_loss`.
        logits: `[1, T_all, V]` or `[B, S, V]`.
        sum_of_sample_mean: The dispatcher's reducer: the sample mean, except under `token_mean`.

    Returns:
        The loss and "loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "ess_ratio", and what the optional
        terms add. Under `token_mean`, "loss", "pg_loss" and "ess_ratio" are sums over tokens, the rest over samples.

    Raises:
        ValueError: a column that the configuration needs is missing.
    """
    responses = Responses.of(args, batch)
    log_probs, entropy = _score(args, batch, logits, entropy_requires_grad=args.entropy_coef != 0)
    use_rollout = getattr(args, "use_rollout_logprobs", False)
    old_log_probs = responses.column("rollout_log_probs" if use_rollout else "log_probs", needed_for="policy loss")
    ppo_kl = old_log_probs - log_probs
    if args.advantage_estimator == "gspo":
        ppo_kl = responses.sequence_mean(ppo_kl)
    pg_loss, pg_clipfrac = compute_policy_loss(
        ppo_kl,
        responses.column("advantages", needed_for="policy loss"),
        args.eps_clip,
        args.eps_clip_high,
        getattr(args, "eps_clip_c", None),
    )
    pg_loss, pg_loss_masks, mismatch = _correct_off_policy(args, responses, pg_loss, ppo_kl)
    whole_mean, kept_mean = _sample_means(args, batch, pg_loss_masks, sum_of_sample_mean)
    pg_reducer = get_pg_loss_reducer(
        args,
        batch,
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        pg_loss_masks=pg_loss_masks,
        max_seq_lens=batch.get("max_seq_lens"),
        default_reducer=kept_mean,
    )
    loss = reduced_pg_loss = pg_reducer(pg_loss)
    per_sample = {"pg_clipfrac": kept_mean(pg_clipfrac), "ppo_kl": kept_mean(ppo_kl)}
    per_sample["entropy_loss"] = kept_mean(entropy)
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * per_sample["entropy_loss"]
    if args.use_kl_loss:
        per_sample["kl_loss"] = kept_mean(_kl_to_reference(args, responses, log_probs, old_log_probs))
        if args.kl_loss_coef != 0:
            loss = loss + args.kl_loss_coef * per_sample["kl_loss"]
    per_sample |= {key: whole_mean(value) for key, value in mismatch.items()}
    return loss, _policy_metrics(args, responses, loss, reduced_pg_loss, ppo_kl, per_sample, whole_mean)


def _score(
    args: Namespace, batch: RolloutBatch, logits: torch.Tensor, *, entropy_requires_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of the response tokens, `[T]` each, 0 at masked positions."""
    scored = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        entropy_requires_grad=entropy_requires_grad,
        max_seq_lens=batch.get("max_seq_lens"),
        loss_masks=batch["loss_masks"],
    )
    return concat(scored["log_probs"]), concat(scored["entropy"])


def _sample_means(
    args: Namespace, batch: RolloutBatch, pg_loss_masks: Sequence[torch.Tensor], given: Reducer
) -> tuple[Reducer, Reducer]:
    """Return the sample means over the original masks and over those that a correction left."""
    # Under token_mean the dispatcher's reducer sums tokens.
    is_given = LossAggregation.of(args) is not LossAggregation.TOKEN_MEAN
    whole = given if is_given else _sample_mean(args, batch, batch["loss_masks"])
    return whole, whole if pg_loss_masks is batch["loss_masks"] else _sample_mean(args, batch, pg_loss_masks)


def _sample_mean(args: Namespace, batch: RolloutBatch, loss_masks: Sequence[torch.Tensor]) -> Reducer:
    """Build the sample-mean reducer over masks of one's own."""
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        qkv_format=args.qkv_format,
        max_seq_lens=batch.get("max_seq_lens"),
        sample_denoms=batch.get("rollout_mask_sums"),
    )


def _correct_off_policy(
    args: Namespace, responses: Responses, pg_loss: torch.Tensor, ppo_kl: torch.Tensor
) -> tuple[torch.Tensor, Sequence[torch.Tensor], dict[str, torch.Tensor]]:
    """Apply TIS or a custom correction; also return the per-token mismatch metrics, which keep the original mask."""
    batch = responses.batch
    metrics: dict[str, torch.Tensor] = {}
    if batch.get("rollout_log_probs") is not None:
        rollout = responses.column("rollout_log_probs", needed_for="mismatch metrics")
        key = "rollout_log_probs" if batch.get("log_probs") is None else "log_probs"
        train = responses.column(key, needed_for="mismatch metrics")
        metrics["train_rollout_logprob_abs_diff"] = (train - rollout).abs()
        metrics["train_rollout_kl"] = compute_approx_kl(rollout, train, "low_var_kl")
    if not (getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False)):
        return pg_loss, batch["loss_masks"], metrics

    path = getattr(args, "custom_tis_function_path", None)
    correct = vanilla_tis_function if path is None else load_function(path)
    needed = "truncated importance sampling (--use-tis, --get-mismatch-metrics)"
    has_rollout = batch.get("rollout_log_probs") is not None
    result = correct(
        args=args,
        pg_loss=pg_loss,
        train_log_probs=responses.per_row(responses.column("log_probs", needed_for=needed)),
        rollout_log_probs=(
            responses.per_row(responses.column("rollout_log_probs", needed_for=needed))
            if has_rollout or path is None
            else None
        ),
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        max_seq_lens=batch.get("max_seq_lens"),
    )
    corrected, masks, correction_metrics = result if path is None else check_correction(path, result, batch, pg_loss)
    metrics["ois"] = safe_exp(-ppo_kl).detach()
    return corrected, masks, {**metrics, **correction_metrics}


def _kl_to_reference(
    args: Namespace, responses: Responses, log_probs: torch.Tensor, old_log_probs: torch.Tensor
) -> torch.Tensor:
    reference = responses.column("ref_log_probs", needed_for="--use-kl-loss")
    ratio = safe_exp(log_probs - old_log_probs) if getattr(args, "use_unbiased_kl", False) else None
    return compute_approx_kl(log_probs, reference, args.kl_loss_type, importance_ratio=ratio)


def _policy_metrics(
    args: Namespace,
    responses: Responses,
    loss: torch.Tensor,
    pg_loss: torch.Tensor,
    ppo_kl: torch.Tensor,
    per_sample: dict[str, torch.Tensor],
    sum_of_sample_mean: Reducer,
) -> MetricDict:
    """Sort the metrics by the count that normalizes them."""
    ess = _effective_sample_ratio(responses, ppo_kl.detach())
    per_token_mode = LossAggregation.of(args) is LossAggregation.TOKEN_MEAN
    ess_reducer = _token_sum(args, responses.batch) if per_token_mode else sum_of_sample_mean
    follows_mode = {"loss": loss, "pg_loss": pg_loss, "ess_ratio": ess_reducer(ess)}
    detach = {key: value.detach() for key, value in follows_mode.items()}
    rest = {key: value.detach() for key, value in per_sample.items()}
    order = ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "ess_ratio"]
    if per_token_mode:
        return MetricDict(rest, detach, order=order)
    return MetricDict({**detach, **rest}, {}, order=order)


def _token_sum(args: Namespace, batch: RolloutBatch) -> Reducer:
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        True,
        args.qkv_format,
        batch.get("max_seq_lens"),
    )


def _effective_sample_ratio(responses: Responses, ppo_kl: torch.Tensor) -> torch.Tensor:
    """Return (sum_t w)^2 / (m_i sum_t w^2) of each row on each of its tokens `[T]`, w = pi / pi_old.

    1 is on-policy; 1 / m_i means that one token carries all the weight.
    """
    weights = safe_exp(-ppo_kl)
    mean = responses.sequence_mean(weights)
    return mean.square() / responses.sequence_mean(weights.square()).clamp_min(torch.finfo(weights.dtype).tiny)


def value_loss_function(
    args: Namespace,
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
    responses = Responses.of(args, batch)
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
    args: Namespace,
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
    log_probs, _ = _score(args, batch, logits)
    loss = -sum_of_sample_mean(log_probs)
    return loss, {"loss": loss.detach()}


def get_loss_function(args: Namespace) -> LossFunction:
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
        return load_function(args.custom_loss_function_path)
    if args.loss_type not in built_in:
        allowed = ", ".join([*built_in, "custom_loss"])
        raise ValueError(f"unknown loss type {args.loss_type!r}; choose one of {allowed}")
    return built_in[args.loss_type]
