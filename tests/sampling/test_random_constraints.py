"""Random requests have the same text drafted and plain with every constraint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from planting import catches

from mlxspec.sampling.round import RoundRow
from tests.engine import random_slices
from tests.engine.random_requests import Case


def _first_only(rows: Sequence[RoundRow], masks: list | None) -> list | None:
    if masks is None:
        return None
    firsts = {0, *accumulate(1 + row.num_drafted for row in rows)}
    return [mask if i in firsts else None for i, mask in enumerate(masks)]


@catches(
    "a constraint holds at the first place of a round only",
    "mlxspec.sampling.round:_masks",
    lambda right: lambda rows, *more: _first_only(rows, right(rows, *more)),
    case="regex",
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("constraint"))
def test_every_constraint(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
