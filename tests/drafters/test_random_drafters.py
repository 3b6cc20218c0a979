"""Random requests have the same text with every drafter as without."""

from __future__ import annotations

import pytest
from planting import catches

from tests.engine import random_slices
from tests.engine.random_requests import Case


@catches(
    "a draft that stands is taken to its end and one token beyond",
    "mlxspec.sampling.acceptance:match",
    lambda right: lambda drafted, sampled: len(drafted),
    case="[mtp-100",
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("drafter"))
def test_every_drafter(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)


@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("block"))
def test_every_block_drafter(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
