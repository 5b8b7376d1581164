"""The adapter, imported as a host imports it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.fast.drop_in.adapter.files import imported_adapter


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The adapter, in a package of its own."""
    with imported_adapter(tmp_path_factory.mktemp("host")) as module:
        yield module
