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


def policy(args: Namespace, step: Step) -> tuple[torch.Tensor, dict[str, float], Reference]:
    """The policy loss of the step and its metrics."""
    ref, mode = Reference(args, step), args.loss_aggregation
    log_probs = ref.each(ref.log_prob)
    train, rollout = ref.given("log_probs"), ref.given("rollout_log_probs")
    old = rollout if args.use_rollout_logprobs else train
    advantages = ref.given("advantages")
    kl = ref.each(lambda i, t: old[i][t] - log_probs[i][t])
    if args.advantage_estimator == "gspo":
        kl = _row_means(ref, kl)
    both = [[_surrogate(args, kl[i][t], a) for t, a in enumerate(row)] for i, row in enumerate(advantages)]
    pg = [[loss for loss, _ in row] for row in both]
    ratio = [[scalar(r - s).exp() for r, s in zip(rs, ss, strict=True)] for rs, ss in zip(train, rollout, strict=True)]
    masks = None
    if args.use_tis:
        weight = [[x.clamp(args.tis_clip_low, args.tis_clip) for x in row] for row in ratio]
        if args.custom_tis_function_path is not None:
            weight = ratio
            masks = [
                [bit * int(x <= args.tis_clip) for bit, x in zip(row.mask, xs, strict=True)]
                for row, xs in zip(ref.rows, ratio, strict=True)
            ]
        pg = ref.each(lambda i, t: pg[i][t] * weight[i][t])
    weights = _row_means(ref, ref.each(lambda i, t: (-kl[i][t]).exp()))
    squares = _row_means(ref, ref.each(lambda i, t: (-2 * kl[i][t]).exp()))
    ess = ref.each(lambda i, t: weights[i][t] ** 2 / squares[i][t] if sum(ref.rows[i].mask) else 0 * weights[i][t])
    entropy, sample = ref.each(ref.entropy), "sample_mean"
    terms = {
        "pg_loss": (pg, mode),
        "entropy_loss": (entropy, sample),
        "pg_clipfrac": ([[scalar(f) for _, f in row] for row in both], sample),
        "ppo_kl": (kl, sample),
        "ess_ratio": (ess, "token_mean" if mode == "token_mean" else sample),
    }
    loss = ref.weigh(pg, mode, masks)
    loss = loss - args.entropy_coef * ref.weigh(entropy, sample, masks)
    if args.use_kl_loss:
        reference = ref.given("ref_log_probs")
        estimate = ref.each(lambda i, t: _kl_estimate(args.kl_loss_type, log_probs[i][t] - reference[i][t]))
        if args.use_unbiased_kl:
            estimate = ref.each(lambda i, t: (log_probs[i][t] - old[i][t]).exp() * estimate[i][t])
        terms["kl_loss"] = (estimate, sample)
        loss = loss + args.kl_loss_coef * ref.weigh(estimate, sample, masks)
    follows = dict.fromkeys(terms.keys() - {"ess_ratio"}, masks)
    terms["train_rollout_logprob_abs_diff"] = (
        ref.each(lambda i, t: scalar(abs(train[i][t] - rollout[i][t]))),
        sample,
    )
    terms["train_rollout_kl"] = (
        ref.each(lambda i, t: _kl_estimate("k3", scalar(rollout[i][t] - train[i][t]))),
        sample,
    )
    if args.use_tis:
        terms["ois"] = (ref.each(lambda i, t: (-kl[i][t]).exp()), sample)
        terms["tis"] = (ratio, sample)
        terms["tis_abs"] = (ref.each(lambda i, t: (ratio[i][t] - 1).abs()), sample)
        clipped = ref.each(lambda i, t: (weight[i][t] != ratio[i][t]).double())
        if masks is not None:
            clipped = ref.each(lambda i, t: (ratio[i][t] > args.tis_clip).double())
        terms["tis_clipfrac"] = (clipped, sample)
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
