"""Every loss in every mode, three ways: the committed snapshot, a naive float64 walk over tokens, and any backend.

The snapshots pin what the package computes from one release to the next; the naive walk says that it is right. After
an intended change: `pytest tests/fast/backends/training_utils/loss --snapshot-update`, and look at the difference.
"""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils.log_utils import aggregate_train_losses
from miles.backends.training_utils.loss import loss_function
from miles.backends.training_utils.parallel import set_parallel_state
from tests.fast import oracle
from tests.fast.backends.training_utils.layout import mode_namespace, simulated_state
from tests.fast.backends.training_utils.loss.inputs import CUT, VOCAB, Step, micro_batch, packed
from tests.fast.backends.training_utils.loss.reference import reference

SNAPSHOT = Path(__file__).parent / "snapshots" / "losses.json"
TIS = {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9}
CONFIGS = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.04, "eps_clip_high": 0.05},
    "reinforce-baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "dual-clip": {"eps_clip_c": 1.15, "eps_clip": 0.1, "eps_clip_high": 0.1},
    "clip-high": {"eps_clip": 0.1, "eps_clip_high": 0.28},
    "temperature": {"rollout_temperature": 0.7},
    "rollout-log-probs": {"use_rollout_logprobs": True},
    "tis": TIS,
    "tis-rejection": {**TIS, "custom_tis_function_path": f"{__name__}.reject_above_clip"},
    "sft": {"loss_type": "sft_loss"},
    "value": {"loss_type": "value_loss", "value_clip": 0.4},
}
WITH_AUXILIARY_TERMS = {  # token_mean rejects these coefficients
    "entropy": {"entropy_coef": 0.03},
    "kl-k1": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k1"},
    "kl-k2": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "entropy_coef": 0.01},
    "kl-k3": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"},
    "kl-low-var": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"},
    "kl-unbiased": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "kl-tis-rejection": {**CONFIGS["tis-rejection"], "use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coef": 0.01},
}
NAMES = [f"{config}/{mode}" for config in CONFIGS for mode in oracle.MODES]
NAMES += [f"{config}/{mode}" for config in WITH_AUXILIARY_TERMS for mode in oracle.MODES if mode != "token_mean"]


def reject_above_clip(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Mask the tokens whose ratio exceeds `tis_clip`; the others weigh their ratio."""
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs)) if train_log_probs else pg_loss
    inside = ratio <= args.tis_clip
    lengths = [len(mask) for mask in loss_masks]
    masks = [mask * keep for mask, keep in zip(loss_masks, inside.split(lengths), strict=True)] if lengths else []
    metrics = {"tis": ratio, "tis_abs": (ratio - 1).abs(), "tis_clipfrac": (~inside).float()}
    return pg_loss * ratio, masks, metrics


def namespace(name):
    config, mode = name.split("/")
    return mode_namespace(mode, 4.0 if mode == "constant" else None, **{**CONFIGS, **WITH_AUXILIARY_TERMS}[config])


def run(args, step, split, megatron=False):
    """`(value, gradient by row, metrics)` of the split, put together as the backend does."""
    dp_size, num_microbatches = len(split), len(split[0])
    total, logs, normalizers = 0.0, [], 0
    gradient = [torch.zeros(0)] * len(step.rows)
    for rank, batches in enumerate(split):
        set_parallel_state(simulated_state(dp_size, 1, dp_rank=rank))
        for indices in batches:
            batch, leaves = micro_batch(args, step, indices)
            logits = packed(leaves, 1 if args.loss_type == "value_loss" else VOCAB)
            loss, normalizer, log = loss_function(args, batch, num_microbatches, logits, megatron)
            if megatron and not args.calculate_per_token_loss:
                loss = loss / num_microbatches
            loss.backward()
            total += loss.item()
            normalizers += int(normalizer)
            logs.append(log)
            for i, leaf in leaves.items():
                gradient[i] = leaf.grad.double()
    divisor = normalizers if megatron and args.calculate_per_token_loss else dp_size
    set_parallel_state(simulated_state(1, 1))
    return total / divisor, [g / divisor for g in gradient], aggregate_train_losses(logs)


@functools.cache
def ran(name, megatron=False):
    return run(namespace(name), Step(), CUT, megatron)


@functools.cache
def naive(name):
    return reference(namespace(name), Step())


def summary(value, gradient, metrics):
    """What a snapshot keeps: the numbers, and the gradient by its norm and three projections."""
    flat = torch.cat([g.flatten() for g in gradient]).double()
    index = torch.arange(len(flat), dtype=torch.float64)
    projections = [torch.dot(flat, torch.sin(index * step + step)).item() for step in (0.37, 1.3, 2.9)]
    return {
        "value": value,
        "gradient_norm": flat.norm().item(),
        "gradient_projections": projections,
        "metrics": metrics,
    }


def rounded(tree):
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    return [rounded(item) for item in tree] if isinstance(tree, list) else float(f"{tree:.7g}")


@pytest.fixture(scope="module")
def snapshots(request):
    if request.config.getoption("--snapshot-update", default=False):
        fresh = {name: rounded(summary(*ran(name))) for name in NAMES}
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(json.dumps(fresh, indent=1) + "\n")
    return json.loads(SNAPSHOT.read_text())


def numbers(tree, prefix=""):
    if isinstance(tree, dict):
        return {k: v for key, item in tree.items() for k, v in numbers(item, f"{prefix}{key}.").items()}
    if isinstance(tree, list):
        return numbers(dict(enumerate(tree)), prefix)
    return {prefix: tree}


@pytest.mark.parametrize("name", NAMES)
def test_snapshot(name, snapshots):
    found, kept = numbers(summary(*ran(name))), numbers(snapshots[name])
    assert found.keys() == kept.keys()
    assert found == pytest.approx(kept, rel=2e-5, abs=2e-6)


def test_no_snapshot_is_left_over(snapshots):
    assert snapshots.keys() == set(NAMES)


@pytest.mark.parametrize("megatron", [False, True], ids=["fsdp", "megatron"])
@pytest.mark.parametrize("name", NAMES)
def test_naive_walk_over_tokens(name, megatron):
    value, gradient, metrics = ran(name, megatron)
    expected, expected_gradient, expected_metrics = naive(name)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    for found, right in zip(gradient, expected_gradient, strict=True):
        assert (found - right).abs().max() < 1e-6


@pytest.mark.parametrize(
    "split", [[[[0, 1, 2, 3, 4, 5]]], [[[5], [4], [3]], [[2], [1], [0]]], [[[2, 4]], [[0, 1, 3, 5]], [[]]]]
)
@pytest.mark.parametrize(
    "name", ["grpo/prompt_mean", "gspo/token_mean", "kl-k3/constant", "tis/sample_mean", "value/token_mean"]
)
def test_other_splits(name, split):
    value, gradient, metrics = run(namespace(name), Step(), split)
    expected, expected_gradient, expected_metrics = naive(name)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    assert max((a - b).abs().max() for a, b in zip(gradient, expected_gradient, strict=True)) < 1e-6


def test_the_inputs_exercise_every_branch():
    """Clips on both sides, dual clip, truncated ratios and value clips all occur, so no snapshot is of dead code."""
    metrics = {name: naive(f"{name}/sample_mean")[2] for name in CONFIGS}
    assert 0 < metrics["grpo"]["pg_clipfrac"] < 1 and 0 < metrics["gspo"]["pg_clipfrac"] < 1
    assert 0 < metrics["tis"]["tis_clipfrac"] < 1 and 0 < metrics["value"]["value_clipfrac"] < 1
    losses = {naive(f"{name}/prompt_mean")[0] for name in CONFIGS if name != "reinforce-baseline"}
    assert len({round(loss, 6) for loss in losses}) == len(CONFIGS) - 1, "each configuration changes the loss"
    assert all(math.isfinite(x) for name in NAMES for x in numbers(summary(*naive(name))).values())


def test_modes_differ_on_these_inputs():
    values = [naive(f"grpo/{mode}")[0] for mode in oracle.MODES]
    assert min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 1e-3
