"""Shows flips that a near tie excused, so that they are never quietly many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import equality


@pytest.fixture(autouse=True)
def _count_flips(record_property) -> Iterator[None]:
    before = len(equality.excused)
    yield
    record_property("excused_flips", len(equality.excused) - before)


def pytest_terminal_summary(terminalreporter) -> None:
    if equality.excused:
        terminalreporter.section("flips excused by a near tie")
        for line in equality.excused:
            terminalreporter.write_line(line)
