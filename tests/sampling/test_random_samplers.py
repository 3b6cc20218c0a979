"""Random requests have the same text drafted and plain with every sampler."""

from __future__ import annotations

import pytest
from planting import catches

from tests.engine import random_slices
from tests.engine.random_requests import Case


@catches(
    "all tokens of a round are drawn with the noise of its first",
    "mlxspec.sampling.round:_positions",
    lambda right: lambda rows, *more: [r.length for r in rows for _ in range(1 + r.num_drafted)],
    case="[hot]",
)
@catches(
    "penalties of a place do not see the drafts before it",
    "mlxspec.sampling.round:_drafts_before",
    lambda right: lambda layout, tokens: right(layout, tokens * 0 + 3),
    case="[repetition]",
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("sampler"))
def test_every_sampler(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
