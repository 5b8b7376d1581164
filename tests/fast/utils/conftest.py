"""What tests of options share."""

import pytest

from miles.utils.arguments import parse_args


@pytest.fixture
def parse(tmp_path):
    """Parse a YAML text over a command line."""

    def parse_with(text, *argv):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return parse_args([*argv, "--custom-config-path", str(path)])

    return parse_with
