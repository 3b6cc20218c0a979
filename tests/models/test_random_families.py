"""Random requests have the same text drafted and plain with models of every family."""

from __future__ import annotations

import pytest
from planting import catches

from tests.engine import random_slices
from tests.engine.random_requests import Case


@catches(
    "rejected tokens stay in recurrent states",
    "mlxspec.cache.rollback:Committed.of",
    lambda right: classmethod(lambda cls, rows, num: right.__func__(cls, rows, list(rows.widths))),
    case="[ends-linear]",
)
@catches(
    "rejected tokens stay in caches of mlx-lm",
    "mlxspec.models.adapted.leaves:cut",
    lambda right: lambda leaf, num: None,
    case="[llama alone]",
)
@catches(
    "a verify sees what its last token sees of a window",
    "mlxspec.cache.windowed:WindowedLayerCache.view",
    lambda right: lambda self, row, length, least=None: right(self, row, length, least and length),
    case="[gemma3]",
    errors=(ValueError,),
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("family"))
def test_every_family(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
