"""Behind a prefix hit a drafter of the demo family is right as often as in a cold run, from memory and from files."""

from __future__ import annotations

import pytest

from tests.engine.behind_hits import DEMO, check, demo_figures


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMO)
def test_the_demo_family(name: str) -> None:
    """Twelve second turns of conversations."""
    assert check(demo_figures(name, DEMO[name]), least=500) == ""
