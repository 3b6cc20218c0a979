"""Random conversations have the same text drafted and plain, whatever the prefix cache holds."""

from __future__ import annotations

import pytest
from planting import catches

from tests.engine import random_slices
from tests.engine.random_requests import Case


@catches(
    "a prefix hit begins with empty keys",
    "mlxspec.cache.attention:AttentionLayerCache.restore",
    lambda right: lambda self, *pieces: right(self, *([x * 0 for x in piece] for piece in pieces)),
    case="4194304",
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("prefix_budget"))
def test_behind_what_the_prefix_cache_holds(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
