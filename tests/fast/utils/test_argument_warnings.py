"""Every warning about an option that changes nothing, and no warning where it does."""

import logging
import shlex

import pytest

from miles.utils.argument_warnings import _WITHOUT_EFFECT
from miles.utils.arguments import _option_actions, parse_args

PLUGIN = "os.path.join"  # any callable that imports


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
        (f"--custom-tis-function-path {PLUGIN}", "custom_tis_function_path: no effect"),
        (
            f"--custom-pg-loss-reducer-function-path {PLUGIN} --loss-aggregation prompt_mean",
            "loss_aggregation: no effect, since --custom-pg-loss-reducer-function-path takes precedence",
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
        ("--label-key answer", "label_key: no effect, since --prompt-data is not set"),
        (
            f"--rm-type numeric --custom-rm-path {PLUGIN}",
            "rm_type: no effect, since --custom-rm-path takes precedence",
        ),
        (
            "--load-debug-rollout-data there/{rollout_id}.pt --rollout-shuffle",
            "rollout_shuffle: no effect, since --load-debug-rollout-data brings samples with their rewards",
        ),
        ("--prompt-groups ragged", "prompt_groups: no effect, since only prompt_mean looks at groups"),
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


def test_warnings_name_options_that_exist():
    names = {name for names, _, _ in _WITHOUT_EFFECT for name in names}
    assert names <= {action.dest for action in _option_actions()}


def test_no_warning_without_options_or_for_defaults_spelled_out(caplog):
    assert warnings_of(caplog, "") == []
    assert warnings_of(caplog, "--use-dynamic-batch-size --max-tokens-per-gpu 64 --kl-loss-coef 0 --tis-clip 2") == []
