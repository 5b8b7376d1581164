"""A missing or untested megatron-core is named, with the command that fixes it."""

from importlib import metadata

import pytest

from miles.backends.megatron_utils.availability import check_megatron
from miles.utils.errors import UserError


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.16rc0"])
def test_tested_versions(version, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    check_megatron()


@pytest.mark.parametrize("version", ["0.12.3", "0.15.0", "0.17.0", "1.0.0"])
def test_other_versions(version, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(UserError, match=rf"needs megatron-core>=0\.16,<0\.17, and {version} is installed; run: pip"):
        check_megatron()


def test_not_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match=r"which is not installed; run: pip install 'miles\[megatron\]'"):
        check_megatron()
