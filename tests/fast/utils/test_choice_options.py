"""The options that change masks, weights and normalizers: values, combinations, YAML and help."""

import argparse

import pytest

from miles.backends.training_utils.loss_hub.corrections import BUILT_IN
from miles.utils.arguments import build_parser, miles_validate_args, parse_args
from miles.utils.errors import UserError
from miles.utils.loss_aggregation_args import CHOICES
from tests.fast.utils.conftest import resolve_and_validate


def option(name):
    return "--" + name.replace("_", "-")


def test_built_in_corrections_are_those_of_the_loss():
    assert set(CHOICES["tis_type"]) == set(BUILT_IN)


@pytest.mark.parametrize("name", CHOICES)
def test_every_value_from_the_command_line_and_from_a_file(name, parse):
    for value in CHOICES[name]:
        assert getattr(parse_args([option(name), value]), name) == value
        for given in CHOICES[name]:
            assert getattr(parse(f"{name}: {value}", option(name), given), name) == value, "the file wins"


@pytest.mark.parametrize("name", CHOICES)
def test_values_that_an_option_does_not_have(name, parse, capsys):
    with pytest.raises(SystemExit):
        parse_args([option(name), "other"])
    assert f"argument {option(name)}: invalid choice: 'other'" in capsys.readouterr().err
    with pytest.raises(UserError, match=rf"{name} \({option(name)}\) must be one of {CHOICES[name][0]}, .*'other'"):
        parse(f"{name}: other")
    with pytest.raises(UserError, match=rf"{name} \({option(name)}\) must be a string; got 3 \(int\)"):
        parse(f"{name}: 3")


@pytest.mark.parametrize("value", ["other", "", None, True, ["drop"], "Drop"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_host_namespace_with_a_value_that_an_option_does_not_have(name, value):
    for args in (
        argparse.Namespace(**{name: value}),
        argparse.Namespace(loss_aggregation="token_mean", **{name: value}),
    ):
        with pytest.raises(UserError, match=rf"^{option(name)} must be one of {', '.join(CHOICES[name])}; got"):
            resolve_and_validate(args)


def test_an_older_host_namespace_gets_the_defaults():
    bare = argparse.Namespace(loss_aggregation="sample_mean")
    resolve_and_validate(bare)
    assert not CHOICES.keys() & vars(bare).keys(), "validation alone adds nothing; the code has the same defaults"
    args = argparse.Namespace(rollout_batch_size=6, n_samples_per_prompt=2)
    miles_validate_args(args)
    assert {name: getattr(args, name) for name in CHOICES} == {k: values[0] for k, values in CHOICES.items()}


# ---- auxiliary terms ------------------------------------------------------------------------------------------------

AUXILIARY = [["--entropy-coef", "0.01"], ["--use-kl-loss", "--kl-loss-coef", "0.1"]]


@pytest.mark.parametrize("terms", AUXILIARY, ids=["entropy", "kl"])
@pytest.mark.parametrize("spelling", [["--loss-aggregation", "token_mean"], ["--calculate-per-token-loss"]])
def test_token_mean_takes_auxiliary_terms_that_match_it(terms, spelling):
    args = parse_args([*spelling, *terms, "--aux-loss-aggregation", "match"])
    assert (args.loss_aggregation, args.aux_loss_aggregation) == ("token_mean", "match")
    with pytest.raises(UserError, match="auxiliary policy-loss terms are sample-normalized") as caught:
        parse_args([*spelling, *terms])
    assert "Pass --aux-loss-aggregation match" in str(caught.value)


def test_a_file_may_say_either(parse):
    command = ["--loss-aggregation", "token_mean", "--entropy-coef", "0.01"]
    assert parse("aux_loss_aggregation: match", *command).entropy_coef == 0.01
    with pytest.raises(UserError, match="auxiliary policy-loss terms are sample-normalized"):
        parse("aux_loss_aggregation: sample_mean", *command, "--aux-loss-aggregation", "match")


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "constant"])
def test_other_modes_take_them_either_way(mode):
    divisor = ["--loss-aggregation-divisor", "8"] if mode == "constant" else []
    for aux in CHOICES["aux_loss_aggregation"]:
        args = parse_args(
            ["--loss-aggregation", mode, *divisor, "--entropy-coef", "0.1", "--aux-loss-aggregation", aux]
        )
        assert (args.loss_aggregation, args.aux_loss_aggregation, args.entropy_coef) == (mode, aux, 0.1)


# ---- bounds of a correction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tis_type", CHOICES["tis_type"])
def test_bounds(tis_type):
    def parse_bounds(low, high):
        return parse_args(["--use-tis", "--tis-type", tis_type, "--tis-clip-low", low, "--tis-clip", high])

    assert parse_bounds("0.5", "2").tis_type == tis_type
    assert parse_bounds("0", "0.5").tis_clip_low == 0.0
    with pytest.raises(UserError, match=r"--tis-clip-low 2.0 must not exceed --tis-clip 1.0"):
        parse_bounds("2", "1")
    if tis_type == "truncated":
        assert parse_bounds("1", "1").tis_clip == 1.0, "a weight of 1 for all"
    else:
        with pytest.raises(
            UserError, match=rf"--tis-type {tis_type} rejects .* must be below --tis-clip; both are 1.0"
        ):
            parse_bounds("1", "1")


# ---- batch sizes ----------------------------------------------------------------------------------------------------


def test_ragged_groups_make_the_batch_size_approximate():
    sizes = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "6", "--prompt-groups", "ragged"]
    assert parse_args([*sizes, "--global-batch-size", "8"]).num_steps_per_rollout == 3
    assert parse_args([*sizes, "--global-batch-size", "10"]).num_steps_per_rollout == 2
    assert parse_args([*sizes, "--global-batch-size", "100"]).num_steps_per_rollout == 1
    assert parse_args([*sizes, "--num-steps-per-rollout", "5"]).global_batch_size == 5
    assert parse_args(sizes).global_batch_size == 24
    with pytest.raises(UserError, match="global_batch_size 10 does not divide"):
        parse_args([*sizes[:4], "--global-batch-size", "10"])


def test_ragged_groups_of_nominally_one_sample_keep_their_normalization(caplog):
    sizes = ["--n-samples-per-prompt", "1", "--prompt-groups", "ragged"]
    assert parse_args(sizes).grpo_std_normalization
    assert "nothing is learned" not in caplog.text
    assert not parse_args(sizes[:2]).grpo_std_normalization


def test_help_says_what_the_bounds_mean_and_where_they_come_from():
    words = " ".join(build_parser().format_help().split())
    for text in (
        "Your efficient RL framework secretly brings you off-policy RL training",
        "IcePop, arXiv:2510.18855",
        "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
        "upper bound: of the weight for truncated, of a token's r for icepop, of a row's geometric mean of r",
        "a custom one's loss and masks are used",
        "declares the keyword `context`",
        "what a rollout holds, for every mode",
    ):
        assert text in words
