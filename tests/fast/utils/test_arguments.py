"""The parser: what it offers, how it behaves beside a host's options, and what its help says."""

import argparse
import re
import subprocess
import sys

import pytest

from miles.rollout.rm_hub import REWARDS
from miles.utils.arguments import build_parser, get_miles_extra_args_provider, miles_validate_args, parse_args
from miles.utils.options import Options
from miles.utils.options.data import TASK_DEPENDENT_DEFAULTS
from miles.utils.options.declare import choices

# What the rest of the package reads from the namespace, and what `python train.py` gives it without an option.
RESOLVED_DEFAULTS = {
    **{"num_rollout": 100, "rollout_batch_size": 32, "n_samples_per_prompt": 8, "rollout_temperature": 1.0},
    **{"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048},
    **{"lr": 2e-3, "lr_warmup_iters": 0, "weight_decay": 0.0, "clip_grad": 1.0},
    **{"loss_aggregation": "sample_mean", "loss_aggregation_divisor": None, "calculate_per_token_loss": False},
    **{"loss_weight_normalization": "weights", "aux_loss_aggregation": "sample_mean"},
    **{"tis_type": "truncated", "rejected_tokens": "drop"},
    **{"prompt_groups": "complete", "custom_pg_loss_reducer_function_path": None, "loss_type": "policy_loss"},
    **{"custom_loss_function_path": None, "use_dynamic_batch_size": False},
    **{"max_tokens_per_gpu": None, "balance_data": False, "advantage_estimator": "grpo"},
    **{"grpo_std_normalization": True, "rewards_normalization": True, "normalize_advantages": False},
    **{"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "value_clip": 0.2, "entropy_coef": 0.0},
    **{"use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_unbiased_kl": False},
    **{"use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None},
    **{"get_mismatch_metrics": False, "use_rollout_logprobs": False, "qkv_format": "thd", "tokenizer_type": "auto"},
    **{"rollout_seed": 42, "rollout_shuffle": False, "log_probs_chunk_size": -1, "prompt_data": None},
    **{"input_key": "input", "label_key": None, "rm_type": None, "reward_key": None, "custom_rm_path": None},
    **{"custom_reward_post_process_path": None, "custom_convert_samples_to_train_data_path": None},
    **{"save_debug_rollout_data": None, "load_debug_rollout_data": None, "rollout_function_path": None},
    **{"train_backend": "fsdp", "min_lr": 0.0, "lr_decay_style": "constant", "adam_beta1": 0.9, "adam_beta2": 0.95},
    **{"adam_eps": 1e-8, "seed": 1234, "output_dir": None, "save": None, "load": None, "save_interval": None},
    **{"ref_load": None, "custom_config_path": None, "num_steps_per_rollout": 1},
    **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1},
    **{"virtual_pipeline_model_parallel_size": None, "use_distributed_optimizer": False},
    **{"overlap_grad_reduce": False},
    **{"tracking": ["jsonl"], "wandb_project": None, "wandb_team": None, "wandb_group": None},
    **{"wandb_mode": None, "wandb_run_id": None},
}


def test_built_in_rewards_are_those_of_the_option():
    assert set(choices(Options, "rm_type")) == set(REWARDS)


def provided_parser(parser=None):
    parser = parser or argparse.ArgumentParser()
    assert get_miles_extra_args_provider()(parser) is parser
    return parser


def test_the_resolved_namespace_without_options():
    args = vars(parse_args([]))
    assert args.pop("global_batch_size") == 32 * 8
    for name, (embedded, _) in TASK_DEPENDENT_DEFAULTS.items():
        assert args.pop(name) == embedded
    assert args == RESOLVED_DEFAULTS


def test_row_limits_depend_on_whose_task_it_is(tmp_path):
    dump = tmp_path / "dump.pt"
    dump.touch()
    args = parse_args(["--load-debug-rollout-data", str(dump)])
    assert (args.rollout_max_response_len, args.micro_batch_size) == (256, 1)
    args = parse_args(["--load-debug-rollout-data", str(dump), "--micro-batch-size", "3"])
    assert args.micro_batch_size == 3


def test_switches_that_turn_something_off():
    args = parse_args(["--disable-grpo-std-normalization", "--disable-rewards-normalization"])
    assert (args.grpo_std_normalization, args.rewards_normalization) == (False, False)


def test_a_host_parser_keeps_its_options_and_gets_our_defaults_types_and_help():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=str, default=None, dest="learning_rate", help="theirs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batch-size", type=int, default=None)
    parser.add_argument("--calculate-per-token-loss", action="store_true", help="theirs")
    parser.add_argument("--lr-decay-style", type=str, default="linear", choices=["constant", "linear", "WSD"])
    args = provided_parser(parser).parse_args(["--lr-decay-style", "WSD", "--calculate-per-token-loss"])
    assert (args.seed, args.micro_batch_size, args.calculate_per_token_loss) == (1234, None, True)
    assert args.lr_decay_style == "WSD"
    learning_rate = parser._option_string_actions["--lr"]
    assert (learning_rate.default, learning_rate.type, learning_rate.dest) == (2e-3, float, "learning_rate")
    assert "peak learning rate" in parser.format_help()
    assert "theirs" not in parser.format_help()


def test_own_options_come_after_ours():
    def add_own(parser):
        parser.add_argument("--own", type=int, default=7)
        return parser

    parser = get_miles_extra_args_provider(add_own)(argparse.ArgumentParser())
    assert parser.parse_args([]).own == 7


def test_a_host_namespace_that_lacks_our_options_gets_our_defaults():
    args = argparse.Namespace(calculate_per_token_loss=True, rollout_batch_size=6, n_samples_per_prompt=2)
    miles_validate_args(args)
    assert (args.loss_aggregation, args.global_batch_size, args.eps_clip_high) == ("token_mean", 12, 0.2)


def test_validating_twice_changes_nothing():
    args = parse_args(["--num-steps-per-rollout", "4", "--loss-aggregation", "token_mean"])
    before = dict(vars(args))
    miles_validate_args(args)
    assert vars(args) == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loss-agg", "prompt_mean"], "unrecognized arguments: --loss-agg prompt_mean"),
        (["--loss-agregation", "prompt_mean"], r"unrecognized.*\(did you mean --loss-aggregation\?\)"),
        (["--loss_aggregation=prompt_mean"], r"\(did you mean --loss-aggregation\?\)"),
        (["--kl-loss-type", "k9"], "invalid choice: 'k9'"),
        (["--train-backend", "deepspeed"], "invalid choice: 'deepspeed'"),
        (["--loss-aggregation-divisor", "eight"], "invalid float value: 'eight'"),
        (["--lr", "fast"], "invalid float value: 'fast'"),
        (["--seed", "1.5"], "invalid int value: '1.5'"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_argparse_refuses_with_status_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_help_explains_every_option_in_a_titled_group():
    parser = build_parser()
    ungrouped = [action.option_strings for action in parser._optionals._group_actions]
    assert ungrouped == [["-h", "--help"], ["--version"]]
    assert all(action.help for action in parser._actions)
    assert all(group.title for group in parser._action_groups)


def test_help_tells_defaults_papers_and_units():
    words = " ".join(build_parser().format_help().split())
    for text in (
        "peak learning rate (default: 0.002)",
        "samples (not prompts) in one optimizer step, over all processes. Unset: from --num-steps-per-rollout",
        "the fixed length L of constant, in tokens",
        "GRPO, arXiv:2402.03300",
        "DAPO, arXiv:2503.14476",
        "ScaleRL, arXiv:2510.13786",
        "Dr.GRPO, arXiv:2503.20783",
        "weight of the KL term, per nat",
    ):
        assert text in words
    for noise in ("default: None", "default: False", "default: True"):
        assert noise not in words


def test_version_and_light_import():
    code = (
        "import sys\n"
        "from miles.utils.arguments import parse_args\n"
        "try:\n    parse_args(['--version'])\nexcept SystemExit as done:\n    assert done.code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("miles ")
