"""`--loss-aggregation` through the host's own `parse_args`: flags, YAML overrides, and every refusal's words."""

from __future__ import annotations

from pathlib import Path

import pytest
from host import Host

PROMPT_MEAN = ("--loss-aggregation", "prompt_mean")
TOKEN_MEAN = ("--loss-aggregation", "token_mean")
SAMPLE_MEAN = ("--loss-aggregation", "sample_mean")
CONSTANT = ("--loss-aggregation", "constant")
LEGACY = "--calculate-per-token-loss"
DIVISOR = "--loss-aggregation-divisor"
SIZES = ("--n-samples-per-prompt", "2", "--global-batch-size", "4")


@pytest.fixture(params=["megatron", "fsdp"])
def backend(request: pytest.FixtureRequest, host: Host) -> str:
    if request.param not in host.backends:
        pytest.skip("the host has no such backend")
    return request.param


def yaml_flag(folder: Path, text: str) -> tuple[str, str]:
    path = folder / "override.yaml"
    path.write_text(text)
    return "--custom-config-path", str(path)


@pytest.mark.parametrize(
    ("flags", "mode", "per_token", "divisor"),
    [
        (SAMPLE_MEAN, "sample_mean", False, None),
        (PROMPT_MEAN, "prompt_mean", False, None),
        (TOKEN_MEAN, "token_mean", True, None),
        ((*TOKEN_MEAN, LEGACY), "token_mean", True, None),
        ((*SAMPLE_MEAN, LEGACY), "token_mean", True, None),
        ((*CONSTANT, DIVISOR, "2048"), "constant", False, 2048.0),
        ((*CONSTANT, DIVISOR, "0.5"), "constant", False, 0.5),
        ((*PROMPT_MEAN, "--entropy-coef", "0.01"), "prompt_mean", False, None),
    ],
)
def check_good_flags(
    host: Host, backend: str, flags: tuple[str, ...], mode: str, per_token: bool, divisor: float | None
) -> None:
    args = host.parse(backend, *SIZES, *flags)
    assert (args.loss_aggregation, args.calculate_per_token_loss) == (mode, per_token)
    assert args.loss_aggregation_divisor == divisor


@pytest.mark.parametrize("flags", [(), (LEGACY,)])
def check_no_new_flag_leaves_the_legacy_choice(host: Host, backend: str, flags: tuple[str, ...]) -> None:
    args = host.parse(backend, *SIZES, *flags)
    assert args.calculate_per_token_loss == bool(flags)
    assert args.loss_aggregation_divisor is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--loss-aggregation", "group_mean"), "Unknown --loss-aggregation mode 'group_mean'"),
        (CONSTANT, "loss-aggregation-divisor"),
        ((*CONSTANT, DIVISOR, "0"), "loss-aggregation-divisor"),
        ((*CONSTANT, DIVISOR, "-8"), "loss-aggregation-divisor"),
        ((*CONSTANT, DIVISOR, "nan"), "loss-aggregation-divisor"),
        ((*CONSTANT, DIVISOR, "inf"), "loss-aggregation-divisor"),
        ((DIVISOR, "8"), "loss-aggregation-divisor"),
        ((*PROMPT_MEAN, DIVISOR, "8"), "loss-aggregation-divisor"),
        ((*PROMPT_MEAN, LEGACY), "incompatible with --calculate-per-token-loss"),
        ((*CONSTANT, DIVISOR, "8", LEGACY), "incompatible with --calculate-per-token-loss"),
        ((*TOKEN_MEAN, "--entropy-coef", "0.01"), "auxiliary policy-loss terms are sample-normalized"),
        ((*PROMPT_MEAN, "--global-batch-size", "3"), "multiple of n_samples_per_prompt"),
    ],
)
def check_bad_flags(host: Host, backend: str, flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        host.parse(backend, *SIZES, *flags)


@pytest.mark.parametrize(
    ("flags", "text", "mode", "per_token"),
    [
        ((), "loss_aggregation: prompt_mean", "prompt_mean", False),
        (PROMPT_MEAN, "loss_aggregation: token_mean", "token_mean", True),
        (TOKEN_MEAN, "loss_aggregation: prompt_mean", "prompt_mean", False),
        ((LEGACY,), "loss_aggregation: prompt_mean", "prompt_mean", False),
        (SAMPLE_MEAN, "calculate_per_token_loss: true", "token_mean", True),
        ((), "loss_aggregation: constant\nloss_aggregation_divisor: 16", "constant", False),
    ],
)
def check_yaml_overrides_the_command_line(
    host: Host, backend: str, tmp_path: Path, flags: tuple[str, ...], text: str, mode: str, per_token: bool
) -> None:
    args = host.parse(backend, *SIZES, *flags, *yaml_flag(tmp_path, text))
    assert (args.loss_aggregation, args.calculate_per_token_loss) == (mode, per_token)


@pytest.mark.parametrize(
    ("flags", "text", "words"),
    [
        ((), "loss_aggregation: 3", "must be a string"),
        ((), "loss_aggregation: group_mean", "Unknown --loss-aggregation mode"),
        (SAMPLE_MEAN, "calculate_per_token_loss: 'yes'", "must be a boolean"),
        ((), "loss_aggregation: prompt_mean\ncalculate_per_token_loss: true", "conflicting values"),
        ((), "loss_aggregation: token_mean\ncalculate_per_token_loss: false", "conflicting values"),
        (CONSTANT, "loss_aggregation_divisor: 0", "loss-aggregation-divisor"),
        (PROMPT_MEAN, "global_batch_size: 3", "multiple of n_samples_per_prompt"),
        (TOKEN_MEAN, "entropy_coef: 0.01", "auxiliary policy-loss terms are sample-normalized"),
    ],
)
def check_bad_yaml(host: Host, backend: str, tmp_path: Path, flags: tuple[str, ...], text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        host.parse(backend, *SIZES, *flags, *yaml_flag(tmp_path, text))
