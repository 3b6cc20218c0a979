"""The last lines of a run say how many tests were skipped for each reason: a skipped test has shown nothing."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter[str]()
    for report in terminalreporter.stats.get("skipped", []):
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")
