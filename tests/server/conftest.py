"""One demo server for all tests that only ask it something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Served


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    with Served("--max-rows", "4", "--prefill-chunk", "64") as served:
        yield served
        assert served.process.poll() is None, "the server has ended:\n" + "\n".join(served.lines[-20:])
