"""The report's options are the training command's, in name, type and rules."""

from argparse import Namespace

import pytest

from miles.tools.aggregation_report.options import (
    TRAINING_OPTIONS,
    args_of_mode,
    build_report_parser,
    training_args,
)
from miles.utils.arguments import build_parser, parse_args
from miles.utils.errors import UserError
from tests.fast.oracle import MODES


def arguments(*options: str) -> Namespace:
    """The training namespace of a command line of the report."""
    return training_args(build_report_parser().parse_args(options))


def test_options_of_training_mean_the_same_here():
    here, there = build_report_parser()._option_string_actions, build_parser()._option_string_actions
    for name in (*TRAINING_OPTIONS, "--loss-aggregation-divisor"):
        mine, theirs = here[name], there[name]
        assert (mine.dest, mine.type, mine.choices, mine.nargs, mine.const) == (
            *(theirs.dest, theirs.type, theirs.choices, theirs.nargs, theirs.const),
        )
    assert here["--divisor"] is here["--loss-aggregation-divisor"]


def test_what_is_unset_is_left_to_the_data():
    args = arguments("a.pt")
    assert args.n_samples_per_prompt is args.global_batch_size is args.loss_aggregation_divisor is None
    assert args.prompt_groups == "complete"
    args = arguments("a.pt", "--n-samples-per-prompt=3", "--global-batch-size=7", "--divisor=2.5")
    assert (args.n_samples_per_prompt, args.global_batch_size, args.loss_aggregation_divisor) == (3, 7, 2.5)


@pytest.mark.parametrize("groups", [[], ["--prompt-groups=ragged"], ["--prompt-groups=complete"]])
@pytest.mark.parametrize("mode", MODES)
def test_the_namespace_of_a_mode_is_that_of_training(mode, groups):
    options = ["--advantage-estimator=gspo", "--disable-grpo-std-normalization", "--reward-key=acc", *groups]
    sizes = ["--n-samples-per-prompt=4", "--global-batch-size=8"]
    mine = vars(args_of_mode(arguments("a.pt", *options, *sizes), mode, divisor=9.0))
    divisor = ["--loss-aggregation-divisor=9"] if mode == "constant" else []
    theirs = vars(parse_args([*options, *sizes, *divisor, f"--loss-aggregation={mode}"]))
    assert mine == theirs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--divisor=0"], "needs --loss-aggregation-divisor, a positive finite number of tokens .*got 0.0"),
        (["--divisor=inf"], "a positive finite number of tokens .*got inf"),
        (["--divisor=1e-320"], "--divisor must be at least 1e-20 tokens; got 9.99989e-321"),
        (["--loss-aggregation-divisor=-3"], "a positive finite number of tokens .*got -3.0"),
        (["--n-samples-per-prompt=0"], "--n-samples-per-prompt must be at least 1; got 0"),
        (["--global-batch-size=-1"], "--global-batch-size must be at least 1; got -1"),
        (["--top=0"], "--top must be at least 1; got 0"),
        (["--right-above=nan"], "--right-above must be a finite number; got nan"),
        (["--advantage-estimator=reinforce_plus_plus_baseline"], "requires --normalize-advantages"),
        (
            ["--custom-reward-post-process-path=nowhere.f"],
            "--custom-reward-post-process-path: cannot import 'nowhere'",
        ),
    ],
)
def test_what_training_refuses_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        arguments("a.pt", *options)
