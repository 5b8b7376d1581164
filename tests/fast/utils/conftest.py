"""What tests of options share."""

import pytest

from miles.utils.arguments import parse_args
from miles.utils.loss_aggregation_args import resolve_loss_aggregation_args, validate_loss_aggregation_args
from miles.utils.options import Options


def resolve_and_validate(args):
    """Apply the rules of `--loss-aggregation` alone to a namespace, and return the view that has the defaults."""
    options = Options.of(args)
    resolve_loss_aggregation_args(options)
    validate_loss_aggregation_args(options)
    return options


@pytest.fixture
def parse(tmp_path):
    """Parse a YAML text over a command line."""

    def parse_with(text, *argv):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return parse_args([*argv, "--custom-config-path", str(path)])

    return parse_with
