"""Random requests have the same text where models propose from some rows of their head."""

from __future__ import annotations

import pytest

from tests.engine import random_slices
from tests.engine.random_requests import Case


@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("some_rows"))
def test_proposals_from_some_rows_of_the_head(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
