"""Every rule of the options outside `--loss-aggregation`, with its message, and every warning."""

import argparse
import logging
import shlex

import pytest

from miles.utils.argument_validation import _RANGES
from miles.utils.arguments import _option_actions, miles_validate_args, parse_args
from miles.utils.errors import UserError

PLUGIN = "os.path.join"  # any callable that imports
# 4 prompts x 6 answers = 24 samples: small numbers whose divisors can be counted by hand.
SIZES = "--rollout-batch-size 4 --n-samples-per-prompt 6 "


def parse(line=""):
    return parse_args(shlex.split(line))


def expect_refusal(message, line):
    with pytest.raises(UserError, match=message):
        parse(line)


def warnings_of(caplog, line):
    with caplog.at_level(logging.WARNING, logger="miles"):
        parse(line)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("line", "batch_size", "num_steps"),
    [
        ("", 24, 1),
        ("--num-steps-per-rollout 3", 8, 3),
        ("--global-batch-size 6", 6, 4),
        ("--num-steps-per-rollout 2 --global-batch-size 12", 12, 2),
        ("--num-steps-per-rollout 24", 1, 24),
    ],
)
def test_batch_sizes_are_derived_from_each_other(line, batch_size, num_steps):
    args = parse(SIZES + line)
    assert (args.global_batch_size, args.num_steps_per_rollout) == (batch_size, num_steps)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--num-steps-per-rollout 3 --global-batch-size 12",
            r"global_batch_size 12 is not equal to rollout_batch_size 4 \* n_samples_per_prompt 6 // "
            "num_steps_per_rollout 3, which is 8",
        ),
        ("--num-steps-per-rollout 5", "num_steps_per_rollout 5 does not divide .* = 24 samples"),
        ("--num-steps-per-rollout 25", "num_steps_per_rollout 25 does not divide"),
        ("--num-steps-per-rollout 5 --global-batch-size 4", "num_steps_per_rollout 5 does not divide"),
        ("--global-batch-size 10", "global_batch_size 10 does not divide .* = 24 samples"),
        ("--global-batch-size 48", "global_batch_size 48 does not divide"),
    ],
)
def test_batch_sizes_that_do_not_divide_or_disagree(line, message):
    expect_refusal(message, SIZES + line)


AT_LEAST_1 = (
    *("num-rollout", "rollout-batch-size", "n-samples-per-prompt", "rollout-max-response-len", "global-batch-size"),
    *("num-steps-per-rollout", "micro-batch-size", "max-tokens-per-gpu", "hidden-size", "num-layers"),
    *("num-attention-heads", "max-position-embeddings", "save-interval"),
)
NOT_NEGATIVE = (
    *("min-lr", "weight-decay", "clip-grad", "eps-clip", "eps-clip-high", "value-clip", "kl-loss-coef"),
    "tis-clip-low",
)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        *((name, value, "at least 1") for name in AT_LEAST_1 for value in ("0", "-3")),
        *(
            (name, v, "positive")
            for name in ("lr", "rollout-temperature", "adam-eps", "tis-clip")
            for v in ("0", "-1")
        ),
        *((name, value, "zero or positive") for name in NOT_NEGATIVE for value in ("-0.1", "nan", "inf")),
        *((name, value, "positive") for name in ("lr", "rollout-temperature") for value in ("nan", "inf", "1e400")),
        ("lr-warmup-iters", "-1", "zero or positive"),
        *(
            (name, value, "between 0 and 9223372036854775807")
            for name in ("seed", "rollout-seed")
            for value in ("-1", str(2**63))
        ),
        *(("eps-clip-c", value, "above 1") for value in ("1", "0.5", "nan", "inf")),
        *((f"adam-beta{i}", value, r"in \[0, 1\)") for i in (1, 2) for value in ("1", "-0.1", "nan")),
        *(("log-probs-chunk-size", value, "-1 or at least 1") for value in ("0", "-2")),
        *(("entropy-coef", value, "any finite number") for value in ("nan", "inf", "-inf")),
    ],
)
def test_numbers_outside_their_range(option, value, words):
    expect_refusal(rf"^--{option} must be {words}; got {value if value != '1e400' else 'inf'}", f"--{option}={value}")


def test_numbers_on_the_edge_of_their_range():
    args = parse("--min-lr 0 --clip-grad 0 --eps-clip 0 --entropy-coef=-0.1 --seed 9223372036854775807 --adam-beta1 0")
    assert (args.clip_grad, args.entropy_coef, args.adam_beta1) == (0.0, -0.1, 0.0)
    assert parse("--eps-clip-c 3 --log-probs-chunk-size 1 --micro-batch-size 1").eps_clip_c == 3.0


def test_every_number_has_a_range():
    numeric = {action.dest for action in _option_actions() if action.type in (int, float)}
    ranged = [name for _, _, names in _RANGES for name in names]
    assert len(ranged) == len(set(ranged))
    assert numeric - {"loss_aggregation_divisor"} == set(ranged)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--use-dynamic-batch-size", "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size: for --train-backend megatron only"),
        (
            "--context-parallel-size 2 --use-distributed-optimizer",
            "--context-parallel-size, --use-distributed-optimizer: for --train-backend megatron only",
        ),
        (
            "--train-backend megatron --tensor-model-parallel-size 3",
            "--num-attention-heads 4 must be a multiple of --tensor-model-parallel-size 3",
        ),
        (
            "--train-backend megatron --pipeline-model-parallel-size 3",
            "--num-layers 2 must be a multiple of the number of stages, --pipeline-model-parallel-size 3",
        ),
        (
            "--train-backend megatron --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 2 x --virtual-pipeline-model-parallel-size 2",
        ),
        (
            "--train-backend megatron --virtual-pipeline-model-parallel-size 2",
            "needs --pipeline-model-parallel-size above 1",
        ),
        ("--save-interval 5", "--save-interval 5 needs --save"),
        ("--use-tis --use-rollout-logprobs", "--use-tis and --use-rollout-logprobs exclude each other"),
        ("--advantage-estimator reinforce_plus_plus_baseline", "requires --normalize-advantages"),
        ("--loss-type custom_loss", "--loss-type custom_loss needs --custom-loss-function-path"),
        (f"--custom-loss-function-path {PLUGIN}", "needs --loss-type custom_loss; got --loss-type policy_loss"),
        ("--hidden-size 66 --num-attention-heads 4", "66 must be a multiple of --num-attention-heads 4"),
        ("--use-tis --tis-clip 1 --tis-clip-low 1.5", "--tis-clip-low 1.5 must not exceed --tis-clip 1.0"),
        ("--lr 1e-4 --min-lr 1e-3", "--min-lr 0.001 must not exceed --lr 0.0001"),
        (
            "--rollout-max-response-len 64 --max-position-embeddings 64",
            "64 must be below --max-position-embeddings 64",
        ),
    ],
)
def test_options_that_need_or_exclude_each_other(line, message):
    expect_refusal(message, line)


@pytest.mark.parametrize(
    "line",
    [
        "--use-dynamic-batch-size --max-tokens-per-gpu 64",
        "--train-backend megatron --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--train-backend megatron --overlap-grad-reduce --use-distributed-optimizer --context-parallel-size 4",
        "--save-interval 5 --save there",
        "--use-tis",
        "--use-rollout-logprobs",
        "--get-mismatch-metrics",
        f"--get-mismatch-metrics --custom-tis-function-path {PLUGIN}",
        f"--custom-pg-loss-reducer-function-path {PLUGIN} --loss-aggregation token_mean",
        "--prompt-groups ragged --loss-aggregation prompt_mean",
        "--get-mismatch-metrics --use-rollout-logprobs",
        "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
        f"--loss-type custom_loss --custom-loss-function-path {PLUGIN}",
        "--lr 1e-3 --min-lr 1e-3 --lr-decay-style linear",
    ],
)
def test_combinations_that_are_fine(line, caplog):
    assert warnings_of(caplog, line) == []


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "1+1=", "answer": "2"}\n')
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--prompt-data needs a reward: --custom-rm-path, or --rm-type {arithmetic,exact_match,numeric}"),
        ("--label-key answer", "--prompt-data needs a reward"),
        ("--rm-type numeric", "--rm-type numeric needs --label-key"),
        ("--loss-type sft_loss", "sft_loss on --prompt-data needs --label-key"),
        ("--rm-type anything", None),
    ],
)
def test_prompts_without_a_reward_or_label(prompts, options, message):
    line = f"--prompt-data {prompts} {options}"
    if message is None:  # argparse's own refusal
        with pytest.raises(SystemExit):
            parse(line)
    else:
        expect_refusal(message, line)


@pytest.mark.parametrize(
    "options",
    ["--rm-type numeric --label-key answer", f"--custom-rm-path {PLUGIN}", "--loss-type sft_loss --label-key answer"],
)
def test_prompts_with_what_they_need(prompts, options, caplog):
    assert warnings_of(caplog, f"--prompt-data {prompts} {options}") == []


@pytest.mark.parametrize("template", ["{step}.pt", "{0}.pt", "{rollout_id", "{rollout_id.x}.pt", "{rollout_id:q}.pt"])
@pytest.mark.parametrize("option", ["--save-debug-rollout-data", "--load-debug-rollout-data"])
def test_dump_paths_with_a_field_that_nothing_fills(option, template):
    expect_refusal(rf"^{option}: .*the one placeholder allowed is \{{rollout_id\}}", f"{option} '{template}'")


def test_a_numbered_dump_is_looked_for_when_it_is_read():
    assert parse("--load-debug-rollout-data there/{rollout_id}.pt").load_debug_rollout_data


def test_prompts_that_a_dump_replaces_need_no_reward(caplog):
    (warning,) = warnings_of(caplog, "--load-debug-rollout-data there.pt --prompt-data prompts.jsonl")
    assert "prompt_data: no effect, since --load-debug-rollout-data" in warning


PLUGIN_OPTIONS = (
    *("--custom-pg-loss-reducer-function-path", "--custom-tis-function-path", "--rollout-function-path"),
    *("--custom-rm-path", "--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"),
    "--custom-loss-function-path",
)


@pytest.mark.parametrize("option", PLUGIN_OPTIONS)
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nodot", "expected package.module.function"),
        ("no.such.module", "cannot import 'no.such'"),
        ("os.path.nothing", "has no attribute 'nothing'"),
        ("os.path.sep", "is a str, not a callable"),
    ],
)
def test_plugins_that_cannot_be_used(option, path, reason):
    loss = "--loss-type custom_loss" if "custom-loss" in option else ""
    expect_refusal(f"^{option}: .*{reason}", f"{option} {path} {loss}")


def test_every_plugin_is_imported_up_front():
    named = {action.option_strings[0] for action in _option_actions() if action.dest.endswith("_path")}
    assert named - {"--custom-config-path"} == set(PLUGIN_OPTIONS)


def test_clip_high_follows_clip_unless_it_is_set():
    assert parse("--eps-clip 0.3").eps_clip_high == 0.3
    assert parse("--eps-clip 0.2 --eps-clip-high 0.28").eps_clip_high == 0.28
    assert parse("--eps-clip 0.2 --eps-clip-high 0").eps_clip_high == 0.0


def test_a_single_sample_has_no_standard_deviation(caplog):
    with caplog.at_level(logging.INFO, logger="miles"):
        args = parse("--n-samples-per-prompt 1")
    assert args.grpo_std_normalization is False
    assert "grpo_std_normalization is off" in caplog.text
    assert "nothing is learned" in caplog.text
    caplog.clear()
    assert warnings_of(caplog, "--n-samples-per-prompt 1 --disable-rewards-normalization") == []


def test_a_host_namespace_is_validated_alike():
    args = argparse.Namespace(rollout_batch_size=4, n_samples_per_prompt=6, global_batch_size=7)
    with pytest.raises(UserError, match="global_batch_size 7 does not divide"):
        miles_validate_args(args)
