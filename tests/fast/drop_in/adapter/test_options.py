"""The adapter's options: what they come to, and what is refused in which words."""

from argparse import ArgumentParser, Namespace
from unittest.mock import MagicMock

import pytest

from tests.fast.drop_in.adapter.files import arguments


def test_no_flag_leaves_the_namespace_alone(adapter):
    parser = ArgumentParser()
    adapter.add_arguments(parser)
    args = parser.parse_args([])
    args.calculate_per_token_loss = True
    before = vars(args).copy()
    adapter.validate_arguments(args)
    assert vars(args) == before
    assert adapter.requested_mode(args) is None
    overrides = {"calculate_per_token_loss": False, "lr": 1.0}
    assert adapter.resolve_overrides(args, overrides) is overrides


def test_a_mock_of_a_namespace_asks_for_nothing(adapter):
    """Tests of hosts hand such arguments in; every attribute is there, and none was set."""
    assert adapter.requested_mode(MagicMock()) is None
    assert adapter.requested_mode(Namespace()) is None


class ByDefault:
    """Options that are defaults of a class, as a host's dataclass of arguments has them."""

    loss_aggregation = "constant"


class Proxy:
    """Options that stand in another object."""

    def __init__(self, args):
        self._args = args

    def __getattr__(self, name):
        return getattr(self._args, name)


def test_the_mode_may_stand_anywhere(adapter):
    assert adapter.requested_mode(ByDefault()) is adapter.MODES["constant"]
    assert adapter.requested_mode(Proxy(arguments())) is adapter.MODES["prompt_mean"]
    assert adapter.requested_mode(Proxy(Namespace())) is None


def test_the_help_names_the_modes(adapter):
    parser = ArgumentParser()
    adapter.add_arguments(parser)
    assert "--loss-aggregation {sample_mean,prompt_mean,token_mean,constant}" in " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_aggregation": "sample_mean"}, ("sample_mean", False)),
        ({"loss_aggregation": "sample_mean", "calculate_per_token_loss": True}, ("token_mean", True)),
        ({"loss_aggregation": "token_mean"}, ("token_mean", True)),
        ({"loss_aggregation": "token_mean", "entropy_coef": 0.5, "loss_type": "custom_loss"}, ("token_mean", True)),
        ({"loss_aggregation": "token_mean", "kl_loss_coef": 0.5}, ("token_mean", True)),
        ({"loss_aggregation": "constant", "loss_aggregation_divisor": 0.5}, ("constant", False)),
        ({"global_batch_size": None}, ("prompt_mean", False)),
    ],
)
def test_choices_that_are_allowed(adapter, given, expected):
    args = arguments(**given)
    adapter.validate_arguments(args)
    assert (args.loss_aggregation, args.calculate_per_token_loss) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_aggregation": 3}, r"loss_aggregation must be a string, one of sample_mean, .*; got 3"),
        ({"loss_aggregation": "mean"}, "Unknown --loss-aggregation mode 'mean'; allowed: sample_mean, prompt_mean"),
        ({"calculate_per_token_loss": 1}, "calculate_per_token_loss must be a boolean; got 1"),
        ({"calculate_per_token_loss": True}, "prompt_mean is incompatible with --calculate-per-token-loss"),
        ({"loss_aggregation_divisor": 2.0}, r"belongs to --loss-aggregation constant, not to prompt_mean; got 2\.0"),
        ({"loss_aggregation": None, "loss_aggregation_divisor": 2.0}, "not to the default; got"),
        ({"loss_aggregation": "constant"}, "a positive finite number of tokens; got None"),
        ({"loss_aggregation": "constant", "loss_aggregation_divisor": True}, "number of tokens; got True"),
        ({"loss_aggregation": "constant", "loss_aggregation_divisor": float("inf")}, "number of tokens; got inf"),
        ({"loss_type": "sft_loss"}, "sft_loss takes --loss-aggregation sample_mean or token_mean only; got prompt"),
        ({"loss_aggregation": "token_mean", "multi_lora": True}, r"is not supported with \['multi_lora'\]"),
        ({"loss_aggregation": "token_mean", "entropy_coef": 0.5}, r"excludes a nonzero entropy_coef 0\.5: auxiliary"),
        (
            {"loss_aggregation": "token_mean", "use_kl_loss": True, "kl_loss_coef": 0.5},
            r"excludes a nonzero kl_loss_coef 0\.5: auxiliary policy-loss terms are sample-normalized; set it to 0",
        ),
        ({"global_batch_size": 5}, "global_batch_size must be a multiple of n_samples_per_prompt 2; got 5"),
    ],
)
def test_choices_that_are_refused(adapter, given, message):
    with pytest.raises(ValueError, match=message):
        adapter.validate_arguments(arguments(**given))


@pytest.mark.parametrize(
    ("mode", "overrides", "expected"),
    [
        ("prompt_mean", {"loss_aggregation": "token_mean"}, True),
        ("token_mean", {"loss_aggregation": "sample_mean"}, False),
        (None, {"loss_aggregation": "token_mean", "calculate_per_token_loss": True}, True),
        ("sample_mean", {"calculate_per_token_loss": True}, True),
    ],
)
def test_the_yaml_file_decides(adapter, mode, overrides, expected):
    resolved = adapter.resolve_overrides(arguments(loss_aggregation=mode), overrides)
    assert resolved["calculate_per_token_loss"] is expected


@pytest.mark.parametrize(
    ("mode", "overrides"),
    [
        (None, {"loss_aggregation": "token_mean", "calculate_per_token_loss": False}),
        (None, {"loss_aggregation": "sample_mean", "calculate_per_token_loss": True}),
        ("constant", {"calculate_per_token_loss": True}),
        ("token_mean", {"calculate_per_token_loss": False}),
    ],
)
def test_the_yaml_file_may_not_contradict(adapter, mode, overrides):
    with pytest.raises(ValueError, match=r"conflicting values: .*; set loss_aggregation alone, in the file"):
        adapter.resolve_overrides(arguments(loss_aggregation=mode), overrides)
