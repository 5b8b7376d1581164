"""The typed view of the options: the parser's names and defaults, shared with the namespace that it views."""

import argparse
import dataclasses
from types import SimpleNamespace

import pytest

from miles.utils.arguments import build_parser
from miles.utils.options import OPTION_GROUPS, Options
from miles.utils.options.declare import add_option_group, option


def test_the_parser_has_the_options_and_their_defaults():
    parsed = vars(build_parser().parse_args([]))
    assert parsed == {field.name: field.default for field in dataclasses.fields(Options)}
    assert set(OPTION_GROUPS.values()) == set(Options.__bases__)


@pytest.mark.parametrize("kind", [argparse.Namespace, SimpleNamespace])
def test_a_view_shares_the_attributes_of_any_namespace(kind):
    args = kind(eps_clip=0.3, of_a_custom_function=7)
    options = Options.of(args)
    assert (options.eps_clip, options.eps_clip_c, options.of_a_custom_function) == (0.3, None, 7)
    options.lr = 0.5
    args.seed = 9
    assert (args.lr, options.seed) == (0.5, 9)
    assert not hasattr(args, "eps_clip_c"), "looking at a default does not set it"
    assert Options.of(options) is options


def test_a_name_that_no_option_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match="eps_clipp"):
        _ = Options.of(argparse.Namespace()).eps_clipp


def test_an_option_is_read_as_its_annotation_says():
    @dataclasses.dataclass
    class Own:
        """Options of a test."""

        sizes: list[int] = option(None, "several")
        is_on: bool = option(False, "a switch")
        is_off: bool = option(True, "another", flag="--no-off")

    parser = argparse.ArgumentParser()
    add_option_group(parser, "own", Own)
    assert vars(parser.parse_args([])) == {"sizes": None, "is_on": False, "is_off": True}
    given = parser.parse_args(["--sizes", "2", "3", "--is-on", "--no-off"])
    assert vars(given) == {"sizes": [2, 3], "is_on": True, "is_off": False}
