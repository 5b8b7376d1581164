"""For a host's own tests, in every process that they start: the stand-ins of `stubs.py`, but the real ray."""

import os

if os.environ.get("HOSTS_OWN_TESTS"):
    import stubs

    stubs.install(first=frozenset())
