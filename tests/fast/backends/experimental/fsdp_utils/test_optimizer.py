"""AdamW's options and the learning-rate schedule."""

from argparse import Namespace

import pytest
import torch

from miles.backends.experimental.fsdp_utils.optimizer import build_lr_scheduler, build_optimizer, learning_rate_factor


def _args(**changes):
    options = {
        **{"lr": 0.5, "min_lr": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6, "weight_decay": 0.25},
        **{"lr_decay_style": "linear", "lr_warmup_iters": 2, "num_rollout": 3, "num_steps_per_rollout": 2},
    }
    return Namespace(**{**options, **changes})


def test_schedules_by_hand():
    # 2 steps of warm-up, then 4 of decay from 1 to 0.2: progress 0, 1/4, 2/4, 3/4.
    def factors(style):
        return [learning_rate_factor(step, style=style, num_warmup=2, num_total=6, final=0.2) for step in range(8)]

    assert factors("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert factors("linear") == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    # cosine: 0.2 + 0.8 * (1 + cos(pi p)) / 2, cos(pi / 4) = 0.70711
    assert factors("cosine") == pytest.approx([0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2, 0.2], abs=1e-6)


def test_a_warmup_longer_than_the_run_only_warms_up():
    assert learning_rate_factor(1, style="cosine", num_warmup=4, num_total=2, final=0.0) == 0.5
    assert learning_rate_factor(4, style="cosine", num_warmup=4, num_total=4, final=0.0) == 1.0


def test_options_reach_adamw():
    optimizer = build_optimizer(_args(), torch.nn.Linear(2, 2))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.9), 1e-6, 0.25)


@pytest.mark.parametrize("num_steps_done", [0, 1, 3, 5])
def test_a_resumed_schedule_goes_on_where_it_stopped_and_the_command_line_decides(num_steps_done):
    def rates(first_step, optimizer):
        scheduler = build_lr_scheduler(_args(), optimizer, num_steps_done=first_step)
        used = []
        for _ in range(first_step, 6):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return used

    whole = rates(0, build_optimizer(_args(), torch.nn.Linear(2, 2)))
    assert whole == pytest.approx([0.25, 0.5, 0.5, 0.4, 0.3, 0.2])
    # What a checkpoint of a run with another --lr and --weight-decay would bring along.
    stale = build_optimizer(_args(lr=9.0, weight_decay=9.0), torch.nn.Linear(2, 2))
    assert rates(num_steps_done, stale) == whole[num_steps_done:]
    assert stale.param_groups[0]["weight_decay"] == 0.25
