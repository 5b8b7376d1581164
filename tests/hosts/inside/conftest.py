"""One host for the session, imported when the first check asks for it."""

from __future__ import annotations

import logging
from typing import Any

import pytest


@pytest.fixture(scope="session")
def host() -> Any:
    from host import find

    logging.disable(logging.CRITICAL)
    return find()
