"""Shows flips that a near tie excused, so that they are never quietly many."""

from __future__ import annotations

from tests.engine import equality


def pytest_terminal_summary(terminalreporter) -> None:
    if equality.excused:
        terminalreporter.section("flips excused by a near tie")
        for line in equality.excused:
            terminalreporter.write_line(line)
