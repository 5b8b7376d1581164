"""Every warning about an option that changes nothing, and no warning where it does."""

import logging
import shlex

import pytest

from miles.utils.argument_warnings import _WITHOUT_EFFECT
from miles.utils.arguments import _option_actions, parse_args
from miles.utils.errors import UserError

PLUGIN = "os.path.join"  # any callable that imports


def factory(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """A custom reducer factory; it is looked at and not called."""


def factory_with_context(total_lengths, response_lengths, loss_masks, calculate_per_token_loss, *, context):
    """A custom reducer factory; it is looked at and not called."""


def warnings_of(caplog, line):
    with caplog.at_level(logging.WARNING, logger="miles"):
        parse_args(shlex.split(line))
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--use-dynamic-batch-size --max-tokens-per-gpu 64 --micro-batch-size 2", "micro_batch_size: no effect"),
        ("--max-tokens-per-gpu 64", "max_tokens_per_gpu: no effect, since --use-dynamic-batch-size is not set"),
        ("--kl-loss-coef 0.1 --kl-loss-type k3", "kl_loss_coef, kl_loss_type: no effect, since --use-kl-loss is not"),
        ("--use-unbiased-kl", "use_unbiased_kl: no effect"),
        ("--ref-load there", "ref_load: no effect"),
        ("--tis-clip 3", "tis_clip: no effect, since neither --use-tis nor --get-mismatch-metrics is set"),
        ("--tis-clip-low 0.5", "tis_clip_low: no effect"),
        (
            "--tis-type icepop --rejected-tokens keep",
            "tis_type, rejected_tokens: no effect, since neither --use-tis nor --get-mismatch-metrics is set",
        ),
        (
            f"--use-tis --tis-type icepop --custom-tis-function-path {PLUGIN}",
            "tis_type: no effect, since --custom-tis-function-path takes precedence",
        ),
        (
            "--use-tis --rejected-tokens keep",
            "rejected_tokens: no effect, since --tis-type truncated rejects no token",
        ),
        (
            "--get-mismatch-metrics --tis-type icepop --rejected-tokens keep",
            "rejected_tokens: no effect, since --get-mismatch-metrics without --use-tis rejects no token",
        ),
        (
            "--loss-aggregation constant --loss-aggregation-divisor 8 --loss-weight-normalization tokens",
            "loss_weight_normalization: no effect, since --loss-aggregation constant divides by neither",
        ),
        (
            "--loss-type sft_loss --use-tis --tis-type icepop --rejected-tokens keep --aux-loss-aggregation match",
            "aux_loss_aggregation, use_tis, tis_type, rejected_tokens: no effect, since --loss-type sft_loss",
        ),
        (f"--custom-tis-function-path {PLUGIN}", "custom_tis_function_path: no effect"),
        *(
            (
                f"--custom-pg-loss-reducer-function-path {path} --loss-aggregation prompt_mean",
                "loss_aggregation: no effect, since --custom-pg-loss-reducer-function-path takes precedence",
            )
            for path in (PLUGIN, f"{__name__}.factory")
        ),
        ("--loss-type sft_loss --eps-clip 0.1 --use-tis", "eps_clip, use_tis: no effect, since --loss-type sft_loss"),
        ("--value-clip 0.1", "value_clip: no effect, since train.py trains no critic"),
        ("--min-lr 1e-5", "min_lr: no effect, since --lr-decay-style is constant"),
        (
            "--disable-grpo-std-normalization --disable-rewards-normalization",
            "grpo_std_normalization: no effect, since --disable-rewards-normalization leaves rewards as they are",
        ),
        (
            "--disable-grpo-std-normalization --advantage-estimator reinforce_plus_plus_baseline "
            "--normalize-advantages",
            "reinforce_plus_plus_baseline never divides",
        ),
        (
            "--wandb-project p --wandb-team t --wandb-group g --wandb-mode offline --wandb-run-id r --tracking jsonl",
            "wandb_project, wandb_team, wandb_group, wandb_mode, wandb_run_id: no effect, since --tracking does not",
        ),
        ("--label-key answer", "label_key: no effect, since --prompt-data is not set"),
        (
            f"--rm-type numeric --custom-rm-path {PLUGIN}",
            "rm_type: no effect, since --custom-rm-path takes precedence",
        ),
        (
            "--load-debug-rollout-data there/{rollout_id}.pt --rollout-shuffle",
            "rollout_shuffle: no effect, since --load-debug-rollout-data brings samples with their rewards",
        ),
        (
            f"--custom-reward-post-process-path {PLUGIN} --disable-rewards-normalization",
            "rewards_normalization: no effect, since --custom-reward-post-process-path replaces",
        ),
        (
            f"--custom-reward-post-process-path {PLUGIN} --custom-convert-samples-to-train-data-path {PLUGIN}",
            "custom_reward_post_process_path: no effect, since --custom-convert-samples-to-train-data-path replaces",
        ),
    ],
)
def test_options_without_effect_are_warned_about(line, message, caplog):
    (warning,) = warnings_of(caplog, line)
    assert message in warning


CONTEXT = f"--custom-pg-loss-reducer-function-path {__name__}.factory_with_context "


@pytest.mark.parametrize(
    "line",
    [
        "--use-tis --tis-type icepop --rejected-tokens keep",
        "--use-tis --tis-type geometric_rejection --tis-clip-low 0.99 --tis-clip 1.01",
        "--get-mismatch-metrics --tis-type icepop",
        f"--get-mismatch-metrics --custom-tis-function-path {PLUGIN} --rejected-tokens keep",
        f"--use-tis --custom-tis-function-path {PLUGIN} --rejected-tokens keep",
        "--aux-loss-aggregation match --loss-aggregation token_mean --entropy-coef 0.1",
        "--loss-weight-normalization tokens",
        "--loss-type sft_loss --loss-weight-normalization tokens --loss-aggregation token_mean",
        *(
            f"--prompt-groups ragged --loss-aggregation {mode}"
            for mode in ("sample_mean", "prompt_mean", "token_mean")
        ),
        # A reducer that declares context may read the divisors and counts of the mode.
        CONTEXT + "--loss-aggregation prompt_mean",
        CONTEXT + "--loss-aggregation constant --loss-aggregation-divisor 8 --loss-weight-normalization tokens",
    ],
)
def test_options_with_effect_are_not_warned_about(line, caplog):
    assert warnings_of(caplog, line) == []


def test_a_reducer_that_does_not_import_is_named_by_validation():
    with pytest.raises(UserError, match=r"^--custom-pg-loss-reducer-function-path: .*no attribute 'nothing'"):
        parse_args(["--loss-aggregation", "prompt_mean", "--custom-pg-loss-reducer-function-path", "os.path.nothing"])


def test_warnings_name_options_that_exist():
    names = {name for names, _, _ in _WITHOUT_EFFECT for name in names}
    assert names <= {action.dest for action in _option_actions()}


def test_no_warning_without_options_or_for_defaults_spelled_out(caplog):
    assert warnings_of(caplog, "") == []
    assert warnings_of(caplog, "--use-dynamic-batch-size --max-tokens-per-gpu 64 --kl-loss-coef 0 --tis-clip 2") == []
