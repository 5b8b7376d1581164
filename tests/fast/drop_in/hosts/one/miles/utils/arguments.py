"""Options, from the command line and from a YAML file over it."""

import argparse

import yaml


def reset_arg(parser, name, **kwargs):
    """Add an option, or change the default of one that a backend has added before."""
    known = [action for action in parser._actions if name in action.option_strings]
    if not known:
        parser.add_argument(name, **kwargs)
    for action in known:
        action.default = kwargs.get("default", action.default)


def get_miles_extra_args_provider(add_custom_arguments=None):
    def add_miles_arguments(parser):
        def add_train_arguments(parser):
            parser.add_argument("--train-backend", choices=["megatron", "fsdp"], default="megatron")
            parser.add_argument("--qkv-format", default="thd")
            parser.add_argument("--micro-batch-size", type=int, default=1)
            parser.add_argument("--recompute-loss-function", action="store_true")
            parser.add_argument("--vocab-size", type=int, default=11)
            return parser

        def add_rollout_arguments(parser):
            parser.add_argument("--rollout-batch-size", type=int, default=2)
            parser.add_argument("--n-samples-per-prompt", type=int, default=2)
            parser.add_argument("--num-steps-per-rollout", type=int, default=None)
            parser.add_argument("--balance-data", action="store_true")
            parser.add_argument("--use-dynamic-global-batch-size", action="store_true")
            reset_arg(parser, "--global-batch-size", type=int, default=None)
            return parser

        def add_algo_arguments(parser):
            parser.add_argument("--loss-type", default="policy_loss")
            parser.add_argument("--entropy-coef", type=float, default=0.0)
            parser.add_argument("--use-kl-loss", action="store_true")
            parser.add_argument("--kl-loss-coef", type=float, default=0.0)
            parser.add_argument("--use-tis", action="store_true")
            parser.add_argument("--get-mismatch-metrics", action="store_true")
            parser.add_argument("--custom-tis-function-path", default=None)
            reset_arg(parser, "--calculate-per-token-loss", action="store_true")
            parser.add_argument(
                "--custom-pg-loss-reducer-function-path",
                type=str,
                default=None,
                help="a factory of the reducer for pg_loss; other metrics keep the default one",
            )
            return parser

        parser = add_train_arguments(parser)
        parser = add_rollout_arguments(parser)
        parser = add_algo_arguments(parser)
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser)
        reset_arg(parser, "--custom-config-path", type=str, default=None)
        return parser

    return add_miles_arguments


def parse_args(argv=None, add_custom_arguments=None):
    parser = argparse.ArgumentParser()
    get_miles_extra_args_provider(add_custom_arguments)(parser)
    args = parser.parse_args(argv)
    miles_validate_args(args)
    return args


def miles_validate_args(args):
    if args.num_steps_per_rollout is not None:
        rows = args.rollout_batch_size * args.n_samples_per_prompt
        args.global_batch_size = rows // args.num_steps_per_rollout

    if args.custom_config_path:
        with open(args.custom_config_path) as file:
            data = yaml.safe_load(file) or {}
        for k, v in data.items():
            setattr(args, k, v)

    assert args.global_batch_size is not None, "set --global-batch-size or --num-steps-per-rollout"
    if args.qkv_format != "thd":
        raise ValueError(f"this host packs sequences, so --qkv-format is thd; got {args.qkv_format}")
