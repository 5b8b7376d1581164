"""Rules and messages of `--loss-aggregation`, on bare namespaces and through the command line."""

import argparse
import math
from types import SimpleNamespace

import pytest

from miles.backends.training_utils.loss_aggregation import MODES
from miles.utils.arguments import parse_args
from miles.utils.errors import UserError
from tests.fast.utils.conftest import resolve_and_validate


def resolved(**values):
    return resolve_and_validate(argparse.Namespace(**values))


def expect_refusal(message, **values):
    with pytest.raises(UserError, match=message) as caught:
        resolved(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "mode", "per_token"),
    [
        ({}, "sample_mean", False),
        ({"calculate_per_token_loss": True}, "token_mean", True),
        ({"calculate_per_token_loss": False}, "sample_mean", False),
        ({"loss_aggregation": "token_mean"}, "token_mean", True),
        ({"loss_aggregation": "token_mean", "calculate_per_token_loss": False}, "token_mean", True),
        ({"loss_aggregation": "token_mean", "calculate_per_token_loss": True}, "token_mean", True),
        ({"loss_aggregation": "sample_mean", "calculate_per_token_loss": True}, "token_mean", True),
        ({"loss_aggregation": "prompt_mean"}, "prompt_mean", False),
        ({"loss_aggregation": "constant", "loss_aggregation_divisor": 8.0}, "constant", False),
    ],
)
def test_both_spellings_resolve_to_one_choice(given, mode, per_token):
    args = resolved(**given)
    assert (args.loss_aggregation, args.calculate_per_token_loss) == (mode, per_token)
    assert args.loss_aggregation_divisor == given.get("loss_aggregation_divisor")
    before = dict(vars(args))
    resolve_and_validate(args)
    assert vars(args) == before, "resolving twice changes nothing"


def test_a_namespace_of_any_class_will_do():
    args = SimpleNamespace(calculate_per_token_loss=True)
    resolve_and_validate(args)
    assert args.loss_aggregation == "token_mean"


@pytest.mark.parametrize("mode", [None, 3, True, ["token_mean"]])
def test_a_mode_that_is_no_string(mode):
    expect_refusal(r"loss_aggregation must be a string, one of sample_mean.*got", loss_aggregation=mode)


@pytest.mark.parametrize("per_token", [None, 1, 0, "true", "false"])
@pytest.mark.parametrize("mode", MODES)
def test_a_legacy_switch_that_is_no_boolean(mode, per_token):
    expect_refusal("must be a boolean", loss_aggregation=mode, calculate_per_token_loss=per_token)


@pytest.mark.parametrize(
    ("mode", "suggestion"),
    [
        ("prompt-mean", "prompt_mean"),
        ("Token_Mean", "token_mean"),
        ("samplemean", "sample_mean"),
        ("const", "constant"),
    ],
)
def test_an_unknown_mode_names_what_is_allowed_and_what_was_meant(mode, suggestion):
    message = expect_refusal("Unknown --loss-aggregation mode", loss_aggregation=mode)
    assert all(name in message for name in (*MODES, repr(mode)))
    assert message.endswith(f"did you mean {suggestion}?")


def test_an_unknown_mode_unlike_any_other_gets_no_suggestion():
    assert "did you mean" not in expect_refusal("Unknown --loss-aggregation mode", loss_aggregation="xyz")


@pytest.mark.parametrize("mode", ["prompt_mean", "constant"])
def test_the_legacy_switch_excludes_other_modes(mode):
    expect_refusal(
        f"{mode} is incompatible with --calculate-per-token-loss",
        loss_aggregation=mode,
        calculate_per_token_loss=True,
        loss_aggregation_divisor=8.0,
    )


@pytest.mark.parametrize(
    "divisor", [None, 0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, False, "8", [8.0]], ids=repr
)
def test_constant_refuses_a_divisor_that_is_no_positive_finite_number(divisor):
    expect_refusal(
        "constant needs --loss-aggregation-divisor, a positive finite number",
        loss_aggregation="constant",
        loss_aggregation_divisor=divisor,
    )


@pytest.mark.parametrize("divisor", [8, 8.0, 1e-3, 1e300])
def test_constant_takes_positive_numbers(divisor):
    assert resolved(loss_aggregation="constant", loss_aggregation_divisor=divisor).loss_aggregation_divisor == divisor


@pytest.mark.parametrize("divisor", [8.0, 0.0, math.nan, "8", False])
@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean"])
def test_other_modes_refuse_any_divisor(mode, divisor):
    expect_refusal(
        f"--loss-aggregation-divisor belongs to --loss-aggregation constant; got .* with {mode}",
        loss_aggregation=mode,
        loss_aggregation_divisor=divisor,
    )


@pytest.mark.parametrize("spelling", [{"loss_aggregation": "token_mean"}, {"calculate_per_token_loss": True}])
@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ({"entropy_coef": 0.01}, "--entropy-coef 0.01"),
        ({"entropy_coef": -0.01}, "--entropy-coef -0.01"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "--kl-loss-coef 0.1"),
    ],
)
def test_token_mean_refuses_auxiliary_terms(spelling, terms, named):
    message = expect_refusal("auxiliary policy-loss terms are sample-normalized", **spelling, **terms)
    assert named in message


@pytest.mark.parametrize(
    "values",
    [
        {"entropy_coef": 0.0, "use_kl_loss": True, "kl_loss_coef": 0.0},
        {"use_kl_loss": False, "kl_loss_coef": 0.1},
        {"loss_type": "sft_loss", "entropy_coef": 0.1},
        {"loss_type": "custom_loss", "entropy_coef": 0.1},
    ],
)
def test_token_mean_admits_terms_that_do_not_count(values):
    assert resolved(loss_aggregation="token_mean", **values).calculate_per_token_loss is True


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "constant"])
def test_other_modes_admit_auxiliary_terms(mode):
    divisor = 8.0 if mode == "constant" else None
    terms = {"entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}
    assert resolved(loss_aggregation=mode, loss_aggregation_divisor=divisor, **terms).loss_aggregation == mode


@pytest.mark.parametrize("mode", ["prompt_mean", "constant"])
def test_sft_takes_sample_and_token_mean_only(mode):
    expect_refusal(
        f"sft_loss takes --loss-aggregation sample_mean or token_mean only; got {mode}",
        loss_type="sft_loss",
        loss_aggregation=mode,
        loss_aggregation_divisor=8.0 if mode == "constant" else None,
    )
    assert resolved(loss_type="sft_loss", loss_aggregation="token_mean").calculate_per_token_loss is True


def test_prompt_mean_needs_whole_groups_in_each_step():
    expect_refusal(
        "must be a multiple of n_samples_per_prompt; got 10 and 4",
        loss_aggregation="prompt_mean",
        global_batch_size=10,
        n_samples_per_prompt=4,
    )


@pytest.mark.parametrize(
    "values",
    [
        {"loss_aggregation": "prompt_mean", "global_batch_size": 12},
        {"loss_aggregation": "prompt_mean", "prompt_groups": "ragged", "global_batch_size": 10},
        {"loss_aggregation": "sample_mean", "global_batch_size": 10},
        {"loss_aggregation": "prompt_mean"},
        {"loss_aggregation": "prompt_mean", "global_batch_size": None},
    ],
)
def test_steps_that_need_no_whole_groups_or_have_them(values):
    assert resolved(n_samples_per_prompt=4, **values).loss_aggregation == values["loss_aggregation"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--loss-aggregation prompt", "Unknown --loss-aggregation mode 'prompt'; allowed: .*did you mean prompt_mean"),
        ("--loss-aggregation constant", "needs --loss-aggregation-divisor.*got none"),
        ("--loss-aggregation constant --loss-aggregation-divisor nan", "got nan"),
        ("--loss-aggregation constant --loss-aggregation-divisor 1e400", "got inf"),
        ("--loss-aggregation constant --loss-aggregation-divisor=-8", "got -8.0"),
        ("--loss-aggregation-divisor 8", "belongs to --loss-aggregation constant"),
        ("--loss-aggregation prompt_mean --calculate-per-token-loss", "incompatible with --calculate-per-token-loss"),
        ("--calculate-per-token-loss --entropy-coef 0.1", "auxiliary policy-loss terms are sample-normalized"),
        ("--loss-aggregation prompt_mean --n-samples-per-prompt 8 --global-batch-size 4", "multiple of n_samples_per"),
        ("--loss-aggregation prompt_mean --num-steps-per-rollout 64", "multiple of n_samples_per_prompt; got 4 and 8"),
        ("--loss-aggregation constant --loss-aggregation-divisor 8 --loss-type sft_loss", "sample_mean or token_mean"),
    ],
)
def test_the_command_line_reaches_every_rule(argv, message):
    with pytest.raises(UserError, match=message):
        parse_args(argv.split())


def test_the_command_line_resolves_the_legacy_switch():
    args = parse_args(["--calculate-per-token-loss"])
    assert (args.loss_aggregation, args.calculate_per_token_loss) == ("token_mean", True)
