"""Each fault that rank_faults.py plants into ranks ends as it should, once."""

from __future__ import annotations

import pytest
import rank_faults


@pytest.mark.slow
@pytest.mark.parametrize("name", list(rank_faults.FAULTS))
def test_ranks_end_as_promised(name: str) -> None:
    """All answers with an error and all processes within ten seconds, and the port is free."""
    assert rank_faults.plant(name).wrong == []
