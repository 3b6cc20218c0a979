"""Random requests have the same text drafted and plain, whoever joins and leaves beside them."""

from __future__ import annotations

import pytest
from planting import catches

from tests.engine import random_slices
from tests.engine.random_requests import Case


@catches(
    "rows that go on change their places",
    "mlxspec.cache.attention:AttentionLayerCache.select",
    lambda right: lambda self, rows: right(self, rows[::-1]),
    case="[together-4]",
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("joins"))
def test_rows_that_join_and_leave(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
