"""Defaults of the embedded task: what `python train.py` without any option trains, and how."""

from typing import Any

EMBEDDED_TASK_DEFAULTS: dict[str, Any] = {
    # the run: num_rollout * rollout_batch_size * n_samples_per_prompt answers in all
    "num_rollout": 100,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "rollout_temperature": 1.0,
    # the model
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    # the optimizer
    "lr": 2e-3,
    "lr_warmup_iters": 0,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
}
"""Tuned together so that reward rises within about a minute on two cores; every value is an option's default."""

TASK_DEPENDENT_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "rollout_max_response_len": (4, 256),
    "micro_batch_size": (256, 1),
}
"""What unset options become: for the embedded task with its rows of a dozen tokens, and for own prompts or dumps."""
