"""Rows of images that are kept for later requests: within the budget the most recently used ones, and the tower runs for no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st
from planting import catches, rewritten

from mlxspec.models.image_features import ImageFeatures

_BYTES = 16  # of a row
_ROWS = "mlxspec.models.image_features:ImageFeatures.rows"


def image(number: int) -> Any:
    """An image of as many tokens as its number."""
    return SimpleNamespace(digest=bytes([number]), tokens=number)


@catches(
    "the oldest rows go, however often they are used", _ROWS, rewritten("self._kept.move_to_end(key)", "pass")
)
@catches("the newest rows go", _ROWS, rewritten("popitem(last=False)", "popitem()"))
@catches(
    "rows are kept beyond the budget", _ROWS, rewritten("while self.nbytes > self.budget:", "while False:")
)
@catches(
    "a budget is not used to its end",
    _ROWS,
    rewritten("while self.nbytes > self.budget:", "while self.nbytes >= self.budget:"),
)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5)), max_size=30), st.integers(0, 12))
def test_the_most_recently_used_rows_are_kept(asked: list[tuple[str, int]], room: int) -> None:
    features = ImageFeatures(lambda prepared: mx.zeros((prepared.tokens, 4)), room * _BYTES)  # type: ignore[arg-type]
    kept: list[tuple[str, int]] = []  # the last used one last
    num_runs = 0
    for owner, number in asked:
        assert features.has(image(number), owner) == ((owner, number) in kept)
        num_runs += (owner, number) not in kept
        assert features.rows(image(number), owner).shape == (number, 4)
        if number <= room:
            kept = [*(each for each in kept if each != (owner, number)), (owner, number)]
        while sum(tokens for _, tokens in kept) > room:
            kept.pop(0)
        assert features.nbytes == _BYTES * sum(tokens for _, tokens in kept)
        assert features.num_runs == num_runs
