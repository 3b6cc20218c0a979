"""A minute among hostile clients; `python -m tests.server.hostile --minutes 10` is the same for longer."""

from __future__ import annotations

import sys

import pytest

from tests.server.hostile import faults, soak


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_minute_among_hostile_clients() -> None:
    found = soak(1)
    assert not list(faults(found)), found
    assert found["statuses"][200] > 20, found
