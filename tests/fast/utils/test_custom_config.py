"""`--custom-config-path`: what overrides what, and every way a file can be wrong."""

import logging
import math

import pytest
import yaml

from miles.utils.arguments import _option_actions, parse_args
from miles.utils.errors import UserError

SIZES = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "6"]


def test_values_override_the_command_line_with_the_types_of_options(parse, caplog):
    text = "lr: 0.002\nclip_grad: 1\nnum_rollout: 3\nuse_tis: true\ngrpo_std_normalization: false\nkl_loss_type: k3\n"
    with caplog.at_level(logging.INFO, logger="miles"):
        args = parse(text + "use_kl_loss: yes\noutput_dir: there\n", "--lr", "0.5", "--num-rollout", "7")
    assert (args.lr, args.num_rollout, args.use_tis, args.grpo_std_normalization) == (0.002, 3, True, False)
    assert (args.kl_loss_type, args.use_kl_loss, args.output_dir) == ("k3", True, "there")
    assert isinstance(args.clip_grad, float), "an integer for a real-valued option is stored as the command line would"
    assert "lr = 0.002 (was 0.5)" in caplog.text
    assert "custom functions" not in caplog.text


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}\n"])
def test_an_empty_file_changes_nothing(parse, text):
    expected = {**vars(parse_args([])), "custom_config_path": None}
    assert {**vars(parse(text)), "custom_config_path": None} == expected


@pytest.mark.parametrize("written", ["1e-3", "1E-3", "+1.0e-3", ".001", "1.e-3", "0.01e-1"])
def test_exponents_are_numbers_without_a_dot_too(parse, written):
    assert yaml.safe_load("1e-3") == "1e-3", "YAML 1.1 reads a string: the reason for our own loader"
    assert parse(f"lr: {written}").lr == 1e-3


def test_null_unsets_what_is_unset_by_default(parse):
    assert parse("eps_clip_c: null\nsave: ~", "--eps-clip-c", "3", "--save", "there").eps_clip_c is None
    with pytest.raises(UserError, match=r"lr \(--lr\) must be a number; got None"):
        parse("lr: null")


def test_other_keys_become_arguments_of_custom_functions(parse, caplog):
    # The keys of a host's configuration for its own importance-sampling function, values as they stand there.
    text = """
        use_tis: true
        use_rs: true
        tis_level: "token"
        rs_level: "token"
        tis_mode: "truncate"
        tis_lower_bound: 0.5
        tis_upper_bound: 2.0
        rs_lower_bound: null
        rs_upper_bound: null
        rs_veto_threshold: 1.0e-4
        tis_batch_normalize: true
        nested: {lr: [1, 2]}
    """
    with caplog.at_level(logging.INFO, logger="miles"):
        args = parse(text)
    assert (args.use_tis, args.use_rs, args.tis_mode, args.rs_veto_threshold) == (True, True, "truncate", 1e-4)
    assert args.nested == {"lr": [1, 2]}
    listed = next(record.getMessage() for record in caplog.records if "custom functions" in record.getMessage())
    assert listed.endswith(
        "nested, rs_level, rs_lower_bound, rs_upper_bound, rs_veto_threshold, tis_batch_normalize, tis_level, "
        "tis_lower_bound, tis_mode, tis_upper_bound, use_rs"
    )


@pytest.mark.parametrize(
    ("text", "argv", "batch_size", "num_steps"),
    [
        ("num_steps_per_rollout: 3", [], 8, 3),
        ("num_steps_per_rollout: 3", ["--num-steps-per-rollout", "2"], 8, 3),
        ("n_samples_per_prompt: 12", ["--num-steps-per-rollout", "2"], 24, 2),
        ("rollout_batch_size: 8", [], 48, 1),
        ("global_batch_size: 6", ["--global-batch-size", "12"], 6, 4),
    ],
)
def test_global_batch_size_is_derived_from_overridden_values(parse, text, argv, batch_size, num_steps):
    args = parse(text, *SIZES, *argv)
    assert (args.global_batch_size, args.num_steps_per_rollout) == (batch_size, num_steps)


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("global_batch_size: 12", ["--num-steps-per-rollout", "3"], "global_batch_size 12 is not equal to"),
        ("global_batch_size: 12\nnum_steps_per_rollout: 3", [], "global_batch_size 12 is not equal to"),
        ("global_batch_size: 10", [], "global_batch_size 10 does not divide"),
        (
            "n_samples_per_prompt: 8\nloss_aggregation: prompt_mean",
            ["--global-batch-size", "4"],
            "multiple of n_samples",
        ),
        (
            "global_batch_size: 4",
            ["--loss-aggregation", "prompt_mean"],
            "multiple of n_samples_per_prompt; got 4 and 6",
        ),
        ("loss_aggregation: constant", [], "needs --loss-aggregation-divisor"),
        ("loss_aggregation_divisor: .nan\nloss_aggregation: constant", [], "loss-aggregation-divisor.*got nan"),
        ("loss_aggregation_divisor: 8", [], "loss-aggregation-divisor belongs to"),
        ("entropy_coef: 0.1", ["--loss-aggregation", "token_mean"], "auxiliary policy-loss terms"),
        ("loss_aggregation: promt_mean", [], "Unknown --loss-aggregation mode 'promt_mean'.*did you mean prompt_mean"),
        ("use_dynamic_batch_size: true", [], "needs --max-tokens-per-gpu"),
        ("lr: .inf", [], "--lr must be positive; got inf"),
        ("custom_rm_path: no.such.function", [], "--custom-rm-path: cannot import"),
    ],
)
def test_overridden_values_are_validated(parse, text, argv, message):
    with pytest.raises(UserError, match=message):
        parse(text, *SIZES, *argv)


def test_a_file_can_mend_the_command_line(parse):
    args = parse("loss_aggregation_divisor: 8", "--loss-aggregation", "constant")
    assert (args.loss_aggregation, args.loss_aggregation_divisor) == ("constant", 8.0)


LEGACY = "--calculate-per-token-loss"


@pytest.mark.parametrize(
    ("text", "argv", "mode"),
    [
        # loss_aggregation in the file settles both spellings
        ("loss_aggregation: sample_mean", [LEGACY], "sample_mean"),
        ("loss_aggregation: prompt_mean", [LEGACY], "prompt_mean"),
        ("loss_aggregation: sample_mean", ["--loss-aggregation", "token_mean", LEGACY], "sample_mean"),
        ("loss_aggregation: token_mean", ["--loss-aggregation", "prompt_mean"], "token_mean"),
        ("loss_aggregation: token_mean\ncalculate_per_token_loss: true", [], "token_mean"),
        ("loss_aggregation: sample_mean\ncalculate_per_token_loss: false", [LEGACY], "sample_mean"),
        ("loss_aggregation: prompt_mean\ncalculate_per_token_loss: false", [], "prompt_mean"),
        # the legacy switch in the file promotes sample_mean, takes the command line's promotion back, or repeats it
        ("calculate_per_token_loss: true", [], "token_mean"),
        ("calculate_per_token_loss: true", ["--loss-aggregation", "token_mean"], "token_mean"),
        ("calculate_per_token_loss: false", [LEGACY], "sample_mean"),
        ("calculate_per_token_loss: false", ["--loss-aggregation", "prompt_mean"], "prompt_mean"),
        ("lr: 0.1", [LEGACY], "token_mean"),
    ],
)
def test_the_file_wins_in_either_spelling_of_the_token_mean(parse, text, argv, mode):
    args = parse(text, *argv)
    assert (args.loss_aggregation, args.calculate_per_token_loss) == (mode, mode == "token_mean")


@pytest.mark.parametrize(
    ("text", "argv", "source"),
    [
        ("loss_aggregation: prompt_mean\ncalculate_per_token_loss: true", [], "config.yaml"),
        ("loss_aggregation: constant\ncalculate_per_token_loss: true", [], "config.yaml"),
        ("loss_aggregation: sample_mean\ncalculate_per_token_loss: true", [], "config.yaml"),
        ("loss_aggregation: token_mean\ncalculate_per_token_loss: false", [], "config.yaml"),
        ("calculate_per_token_loss: true", ["--loss-aggregation", "prompt_mean"], "the command line"),
        ("calculate_per_token_loss: true", ["--loss-aggregation", "constant"], "the command line"),
        ("calculate_per_token_loss: false", ["--loss-aggregation", "token_mean"], "the command line"),
    ],
)
def test_spellings_that_disagree(parse, text, argv, source):
    with pytest.raises(UserError, match="conflicting values: calculate_per_token_loss is") as caught:
        parse(text, *argv)
    assert f"{source}. Every mode but token_mean is incompatible with --calculate-per-token-loss" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss_aggregation: 3", r"loss_aggregation \(--loss-aggregation\) must be a string; got 3 \(int\)"),
        ("loss_aggregation: true", "must be a string; got True"),
        ("loss_aggregation: null", "must be a string; got None"),
        ("loss_aggregation: [token_mean]", r"must be a string; got \['token_mean'\] \(list\)"),
        ("output_dir: 7", r"output_dir \(--output-dir\) must be a string"),
        ("calculate_per_token_loss: 'true'", r"\(--calculate-per-token-loss\) must be a boolean; got 'true' \(str\)"),
        ("calculate_per_token_loss: 1", "must be a boolean; got 1"),
        ("calculate_per_token_loss: null", "must be a boolean; got None"),
        ("grpo_std_normalization: 0", "must be a boolean"),
        ("num_rollout: 2.5", r"num_rollout \(--num-rollout\) must be an integer; got 2.5 \(float\)"),
        ("num_rollout: 1e3", "must be an integer; got 1000.0"),
        ("num_rollout: '3'", "must be an integer; got '3'"),
        ("num_rollout: true", "must be an integer; got True"),
        ("lr: fast", "must be a number; got 'fast'"),
        ("lr: '1e-3'", "must be a number; got '1e-3'"),
        ("loss_aggregation_divisor: true", r"\(--loss-aggregation-divisor\) must be a number; got True"),
        ("loss_aggregation_divisor: '8'", r"\(--loss-aggregation-divisor\) must be a number; got '8'"),
        ("kl_loss_type: k9", r"kl_loss_type \(--kl-loss-type\) must be one of k1, k2, k3, low_var_kl; got 'k9'"),
        ("lr: 1" + 400 * "0", "--lr must be positive; got inf"),
    ],
)
def test_values_of_a_wrong_type(parse, text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_types_come_from_the_parser_for_every_option(parse):
    wrong = {bool: "'x'", int: "1.5", float: "x", str: "1.5", None: "1.5"}
    checked = [action for action in _option_actions() if action.dest != "custom_config_path"]
    for action in checked:
        kind = bool if action.nargs == 0 else action.type
        with pytest.raises(UserError, match=f"{action.dest} \\({action.option_strings[0]}\\) must be a"):
            parse(f"{action.dest}: {wrong[kind]}")
    assert len(checked) > 60


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("loss_agregation", "loss_aggregation"),
        ("loss-aggregation", "loss_aggregation"),
        ("--loss-aggregation", "loss_aggregation"),
        ("Loss_Aggregation", "loss_aggregation"),
        ("loss_aggregation_diviser", "loss_aggregation_divisor"),
        ("calculate_per_token", "calculate_per_token_loss"),
        ("calculate-per-token-loss", "calculate_per_token_loss"),
        ("n_sample_per_prompt", "n_samples_per_prompt"),
        ("microbatch_size", "micro_batch_size"),
        ("entropy_coeff", "entropy_coef"),
        ("LR", "lr"),
        ("disable_grpo_std_normalization", "grpo_std_normalization"),
        ("disable-rewards-normalization", "rewards_normalization"),
    ],
)
def test_a_key_that_is_nearly_an_option(parse, key, meant):
    with pytest.raises(UserError, match=rf"key '{key}' is no option; did you mean {meant}\? Options .* underscores"):
        parse(f"{key}: 1")


@pytest.mark.parametrize("key", ["my-threshold", "'two words'", "3", "null", "1.5", "'3d'"])
def test_a_key_that_cannot_be_an_attribute(parse, key):
    with pytest.raises(UserError, match="must be a name of letters, digits and underscores"):
        parse(f"{key}: 1")


def test_a_file_that_names_another(parse):
    with pytest.raises(UserError, match="cannot name another one"):
        parse("custom_config_path: other.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 0.1\nseed: [1, 2\n", "config.yaml, line 3: not valid YAML"),
        ("lr: 0.1\n\tseed: 2\n", "config.yaml, line 2: not valid YAML"),
        ("lr: a: b\n", "config.yaml, line 1: not valid YAML"),
        ("lr: 0.1\nseed: 3\nlr: 0.2\n", "config.yaml, line 3: not valid YAML: key 'lr' stands twice"),
        ("lr: !!python/object/apply:os.getcwd []\n", "line 1: not valid YAML: could not determine a constructor"),
        ("when: 2024-13-45\n", "config.yaml: not valid YAML: month must be in 1..12"),
        ("lr: 0.1\n---\nlr: 0.2\n", "config.yaml, line 2: not valid YAML"),
        ("lr: \x07\n", "config.yaml: not valid YAML"),
        ("lr: \0\n", "config.yaml: not valid YAML: unacceptable character #x0000: .* position 4$"),
        ("lr: " + 10_000 * "[", "config.yaml: not valid YAML: maximum recursion depth"),
        ("[lr]: 1\n", "not valid YAML"),
        ("- lr\n- 0.1\n", "the top level must be a mapping .* got a list"),
        ("lr\n", "must be a mapping .* got a str"),
        ("false\n", "must be a mapping .* got a bool"),
        ("0\n", "must be a mapping .* got a int"),
    ],
)
def test_a_file_that_is_no_yaml_mapping(parse, text, message):
    with pytest.raises(UserError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(UserError, match=f"cannot read --custom-config-path {path}"):
            parse_args(["--custom-config-path", str(path)])
    (tmp_path / "latin.yaml").write_bytes(b"save: caf\xe9\n")
    with pytest.raises(UserError, match=r"cannot read .*latin.yaml: 'utf-8'"):
        parse_args(["--custom-config-path", str(tmp_path / "latin.yaml")])


def test_infinite_and_missing_numbers_are_read_as_such(parse):
    args = parse("own_limit: .inf\nown_nothing: .nan\nown_words: '1e-3'")
    assert args.own_limit == math.inf and math.isnan(args.own_nothing) and args.own_words == "1e-3"
