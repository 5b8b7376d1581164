"""AdamW and its learning-rate schedule, as closed forms of the arguments and the number of steps done."""

import math
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from miles.utils.options import Options


def build_optimizer(args: Options, model: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW over the model's (sharded) parameters, with `args`' learning rate, betas, eps and weight decay.

    Fused, since a loop over operations would go through DTensor's dispatch a dozen times for each parameter.
    """
    return torch.optim.AdamW(model.parameters(), fused=True, **adamw_options(args))


def adamw_options(args: Options) -> dict[str, Any]:
    """Return what `args` says about AdamW, by the names that its parameter groups use."""
    return {
        "lr": args.lr,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_eps,
        "weight_decay": args.weight_decay,
    }


def learning_rate_factor(step: int, *, style: str, num_warmup: int, num_total: int, final: float) -> float:
    """Return the share of the peak learning rate that optimizer step `step` uses.

    Warm-up: `(step + 1) / num_warmup` while `step < num_warmup`. After it, with
    `p = (step - num_warmup) / (num_total - num_warmup)` in [0, 1]: constant 1; linear `final + (1 - final) (1 - p)`;
    cosine `final + (1 - final) (1 + cos(pi p)) / 2`.

    Args:
        step: Optimizer steps done before this one.
        style: constant, linear or cosine.
        num_warmup: Steps of linear warm-up, 0 for none.
        num_total: Optimizer steps of the whole run.
        final: Share of the peak that the decay ends at, in [0, 1].
    """
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = min(1.0, (step - num_warmup) / max(1, num_total - num_warmup))
    shape = {
        "constant": lambda: 1.0,
        "linear": lambda: final + (1.0 - final) * (1.0 - progress),
        "cosine": lambda: final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2.0,
    }
    return shape[style]()


def scheduled_factor(args: Options, step: int) -> float:
    """Return `learning_rate_factor` of the run that `args` describe."""
    return learning_rate_factor(
        step,
        style=args.lr_decay_style,
        num_warmup=args.lr_warmup_iters,
        num_total=args.num_rollout * args.num_steps_per_rollout,
        final=args.min_lr / args.lr,
    )


def build_lr_scheduler(args: Options, optimizer: torch.optim.Optimizer, *, num_steps_done: int) -> LambdaLR:
    """Return the schedule, positioned after `num_steps_done` optimizer steps.

    The command line decides the hyperparameters, in a resumed run too: they are written into the parameter groups
    here, over what a checkpoint brought along.
    """
    for group in optimizer.param_groups:
        group.update(adamw_options(args), initial_lr=args.lr)

    return LambdaLR(optimizer, partial(scheduled_factor, args), last_epoch=num_steps_done - 1)
