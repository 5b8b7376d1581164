"""Every loss once more, naively: one token at a time in float64, unsplit, weighted by the fractions oracle."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import torch

from tests.fast import oracle
from tests.fast.backends.training_utils.loss.inputs import Step

Column = list[list[torch.Tensor]]


def scalar(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


class Reference:
    """Per-token terms `[row][t]` as float64 scalars of a graph whose leaves are the step's logits."""

    def __init__(self, args: Namespace, step: Step) -> None:
        self.args, self.step, self.rows = args, step, step.rows
        source = step.head if args.loss_type == "value_loss" else step.logits
        self.leaves = [torch.tensor(source(i), dtype=torch.float64, requires_grad=True) for i in range(len(self.rows))]

    def each(self, term: Callable[[int, int], torch.Tensor]) -> Column:
        return [[term(i, t) for t in range(row.response_length)] for i, row in enumerate(self.rows)]

    def given(self, name: str) -> list[list[float]]:
        """An input column, rounded to float32 as the package receives it."""
        return [torch.tensor(self.step.column(name, i)).double().tolist() for i in range(len(self.rows))]

    def position(self, i: int, t: int) -> torch.Tensor:
        return self.leaves[i][self.rows[i].prompt_length + t - 1]

    def log_prob(self, i: int, t: int) -> torch.Tensor:
        z = self.position(i, t) / self.args.rollout_temperature
        return z[self.step.tokens(i)[self.rows[i].prompt_length + t]] - z.exp().sum().log()

    def entropy(self, i: int, t: int) -> torch.Tensor:
        z = self.position(i, t) / self.args.rollout_temperature
        p = z.exp() / z.exp().sum()
        return -(p * p.log()).sum()

    def weigh(self, column: Column, mode: str, masks: list[list[int]] | None = None) -> torch.Tensor:
        """The step's value of the column: exact weights of the mode times the terms at active tokens.

        `masks` of a correction take tokens out of the sum. Only the sample mean, whose count is the row's own, also
        counts what is left; the other modes' counts are those of the step.
        """
        rows, total = self.rows, scalar(0.0)
        if masks is not None and mode == "sample_mean":
            rows = [oracle.remask(row, mask) for row, mask in zip(rows, masks, strict=True)]
        weights = oracle.weights(rows, mode, self.args.loss_aggregation_divisor)
        for i, row in enumerate(rows):
            for t in range(row.response_length):
                if row.mask[t] and (masks is None or masks[i][t]):
                    total = total + float(weights[i][t]) * column[i][t]
        return total


def _row_means(ref: Reference, column: Column) -> Column:
    """The mean over the row's active tokens, on each of its tokens."""
    spread = []
    for row, terms in zip(ref.rows, column, strict=True):
        active = [x for x, bit in zip(terms, row.mask, strict=True) if bit]
        mean = sum(active) / len(active) if active else scalar(0.0)
        spread.append([mean] * row.response_length)
    return spread


def _surrogate(args: Namespace, kl: torch.Tensor, advantage: float) -> tuple[torch.Tensor, float]:
    ratio = (-kl).exp()
    clipped_ratio = ratio
    if ratio < 1 - args.eps_clip:
        clipped_ratio = scalar(1 - args.eps_clip)
    elif ratio > 1 + args.eps_clip_high:
        clipped_ratio = scalar(1 + args.eps_clip_high)
    plain, clipped = -ratio * advantage, -clipped_ratio * advantage
    loss, fraction = (clipped, 1.0) if clipped > plain else (plain, 0.0)
    if args.eps_clip_c is not None and advantage < 0 and loss > -args.eps_clip_c * advantage:
        loss = scalar(-args.eps_clip_c * advantage)
    return loss, fraction


def _kl_estimate(kind: str, log_ratio: torch.Tensor) -> torch.Tensor:
    """r = log pi - log base: r, r^2/2, e^-r - 1 + r."""
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    return (-log_ratio).exp() - 1 + log_ratio


def _metrics(ref: Reference, terms: dict[str, tuple[Column, str]], masks: dict[str, list[list[int]]]) -> dict:
    return {key: ref.weigh(column, mode, masks.get(key)).item() for key, (column, mode) in terms.items()}


def _corrected(args: Namespace, ref: Reference, ratio: Column) -> tuple[Column, list[list[int]] | None]:
    """The importance weight of each token, and the masks of a correction that takes tokens out."""
    if args.custom_tis_function_path is None:
        return [[x.clamp(args.tis_clip_low, args.tis_clip) for x in row] for row in ratio], None
    masks = [
        [bit * int(x <= args.tis_clip) for bit, x in zip(row.mask, xs, strict=True)]
        for row, xs in zip(ref.rows, ratio, strict=True)
    ]
    return ratio, masks


def _ess_ratio(ref: Reference, kl: Column) -> Column:
    weights = _row_means(ref, ref.each(lambda i, t: (-kl[i][t]).exp()))
    squares = _row_means(ref, ref.each(lambda i, t: (-2 * kl[i][t]).exp()))
    return ref.each(lambda i, t: weights[i][t] ** 2 / squares[i][t] if sum(ref.rows[i].mask) else 0 * weights[i][t])


def _kl_loss(args: Namespace, ref: Reference, log_probs: Column, old: list[list[float]]) -> Column:
    base = ref.given("ref_log_probs")
    estimate = ref.each(lambda i, t: _kl_estimate(args.kl_loss_type, log_probs[i][t] - base[i][t]))
    if args.use_unbiased_kl:
        estimate = ref.each(lambda i, t: (log_probs[i][t] - old[i][t]).exp() * estimate[i][t])
    return estimate


def _mismatch(ref: Reference, train: list[list[float]], rollout: list[list[float]]) -> dict[str, Column]:
    return {
        "train_rollout_logprob_abs_diff": ref.each(lambda i, t: scalar(abs(train[i][t] - rollout[i][t]))),
        "train_rollout_kl": ref.each(lambda i, t: _kl_estimate("k3", scalar(rollout[i][t] - train[i][t]))),
    }


def _tis(args: Namespace, ref: Reference, kl: Column, ratio: Column, weight: Column) -> dict[str, Column]:
    if args.custom_tis_function_path is None:
        is_clipped = ref.each(lambda i, t: (weight[i][t] != ratio[i][t]).double())
    else:
        is_clipped = ref.each(lambda i, t: (ratio[i][t] > args.tis_clip).double())
    return {
        "ois": ref.each(lambda i, t: (-kl[i][t]).exp()),
        "tis": ratio,
        "tis_abs": ref.each(lambda i, t: (ratio[i][t] - 1).abs()),
        "tis_clipfrac": is_clipped,
    }


def policy(args: Namespace, step: Step) -> tuple[torch.Tensor, dict[str, float], Reference]:
    """The policy loss of the step and its metrics."""
    ref, mode, sample = Reference(args, step), args.loss_aggregation, "sample_mean"
    log_probs, entropy = ref.each(ref.log_prob), ref.each(ref.entropy)
    train, rollout, advantages = (ref.given(name) for name in ("log_probs", "rollout_log_probs", "advantages"))
    old = rollout if args.use_rollout_logprobs else train
    kl = ref.each(lambda i, t: old[i][t] - log_probs[i][t])
    if args.advantage_estimator == "gspo":
        kl = _row_means(ref, kl)
    both = [[_surrogate(args, kl[i][t], a) for t, a in enumerate(row)] for i, row in enumerate(advantages)]
    pg = [[loss for loss, _ in row] for row in both]
    ratio = ref.each(lambda i, t: scalar(train[i][t] - rollout[i][t]).exp())
    weight, masks = _corrected(args, ref, ratio) if args.use_tis else (None, None)
    if args.use_tis:
        pg = ref.each(lambda i, t, plain=pg: plain[i][t] * weight[i][t])
    terms = {
        "pg_loss": (pg, mode),
        "entropy_loss": (entropy, sample),
        "pg_clipfrac": ([[scalar(f) for _, f in row] for row in both], sample),
        "ppo_kl": (kl, sample),
        "ess_ratio": (_ess_ratio(ref, kl), "token_mean" if mode == "token_mean" else sample),
    }
    loss = ref.weigh(pg, mode, masks)
    loss = loss - args.entropy_coef * ref.weigh(entropy, sample, masks)
    if args.use_kl_loss:
        terms["kl_loss"] = (_kl_loss(args, ref, log_probs, old), sample)
        loss = loss + args.kl_loss_coef * ref.weigh(terms["kl_loss"][0], sample, masks)
    follows = dict.fromkeys(terms.keys() - {"ess_ratio"}, masks)
    seen = _mismatch(ref, train, rollout) | (_tis(args, ref, kl, ratio, weight) if args.use_tis else {})
    terms |= {key: (column, sample) for key, column in seen.items()}
    return loss, {"loss": loss.item(), **_metrics(ref, terms, follows)}, ref


def value(args: Namespace, step: Step) -> tuple[torch.Tensor, dict[str, float], Reference]:
    """The clipped value loss; its metrics follow the token sum when per-token loss is on."""
    ref = Reference(args, step)
    mode = "token_mean" if args.calculate_per_token_loss else "sample_mean"
    old, returns = ref.given("values"), ref.given("returns")

    def squared_error(i: int, t: int) -> torch.Tensor:
        v = ref.position(i, t)[0]
        step_size = min(max((v - old[i][t]).item(), -args.value_clip), args.value_clip)
        clipped = scalar(old[i][t] + step_size) if abs((v - old[i][t]).item()) > args.value_clip else v
        return max((clipped - returns[i][t]) ** 2, (v - returns[i][t]) ** 2, key=lambda x: x.item())

    def outside(i: int, t: int) -> torch.Tensor:
        return ((ref.position(i, t)[0] - old[i][t]).abs() > args.value_clip).double()

    loss = ref.weigh(ref.each(squared_error), mode)
    return loss, {"value_loss": loss.item(), "value_clipfrac": ref.weigh(ref.each(outside), mode).item()}, ref


def sft(args: Namespace, step: Step) -> tuple[torch.Tensor, dict[str, float], Reference]:
    """Negative log-likelihood."""
    ref = Reference(args, step)
    loss = -ref.weigh(ref.each(ref.log_prob), "token_mean" if args.calculate_per_token_loss else "sample_mean")
    return loss, {"loss": loss.item()}, ref


def reference(args: Namespace, step: Step) -> tuple[float, list[torch.Tensor], dict[str, float]]:
    """`(value, gradient of each row's logits, metrics)` of the unsplit step in float64."""
    loss, metrics, ref = {"policy_loss": policy, "value_loss": value, "sft_loss": sft}[args.loss_type](args, step)
    gradients = torch.autograd.grad(loss, ref.leaves, allow_unused=True)
    filled = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, ref.leaves, strict=True)]
    return loss.item(), filled, metrics
