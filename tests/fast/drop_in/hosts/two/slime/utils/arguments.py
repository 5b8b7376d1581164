"""Options, from the command line and from a YAML file over it."""

import argparse

import yaml


def get_slime_extra_args_provider(add_custom_arguments=None):
    def add_slime_arguments(parser):
        def add_rollout_arguments(parser):
            parser.add_argument("--rollout-batch-size", type=int, default=2)
            parser.add_argument("--n-samples-per-prompt", type=int, default=2)
            parser.add_argument("--num-steps-per-rollout", type=int, default=None)
            parser.add_argument("--global-batch-size", type=int, default=None)
            parser.add_argument("--micro-batch-size", type=int, default=1)
            parser.add_argument("--balance-data", action="store_true")
            return parser

        def add_algo_arguments(parser):
            parser.add_argument("--loss-type", default="policy_loss")
            parser.add_argument("--entropy-coef", type=float, default=0.0)
            parser.add_argument("--use-tis", action="store_true")
            parser.add_argument("--get-mismatch-metrics", action="store_true")
            parser.add_argument("--calculate-per-token-loss", action="store_true")
            parser.add_argument("--custom-pg-loss-reducer-function-path", type=str, default=None)
            parser.add_argument("--recompute-loss-function", action="store_true")
            return parser

        parser = add_rollout_arguments(parser)
        parser = add_algo_arguments(parser)
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser)
        parser.add_argument("--custom-config-path", type=str, default=None)
        return parser

    return add_slime_arguments


def parse_args(argv=None, add_custom_arguments=None):
    parser = argparse.ArgumentParser()
    get_slime_extra_args_provider(add_custom_arguments)(parser)
    args = parser.parse_args(argv)
    slime_validate_args(args)
    return args


def slime_validate_args(args):
    if args.num_steps_per_rollout is not None:
        args.global_batch_size = args.rollout_batch_size * args.n_samples_per_prompt // args.num_steps_per_rollout

    if args.custom_config_path:
        with open(args.custom_config_path) as file:
            data = yaml.safe_load(file) or {}
        for k, v in data.items():
            setattr(args, k, v)

    assert args.global_batch_size is not None, "set --global-batch-size or --num-steps-per-rollout"
