"""Taking the flat token axis apart by rows, and putting it together."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels.flat import FlatRows

pytestmark = pytest.mark.smoke

widths = st.lists(st.integers(0, 7) | st.integers(0, 70), min_size=1, max_size=8).filter(any)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(widths=widths)
def test_apart_and_together_is_nothing(widths: list[int]) -> None:
    rows = FlatRows(tuple(widths))
    index, num = rows.index, rows.num_tokens
    assert rows.active == [r for r, w in enumerate(widths) if w]
    assert rows.last_indices.tolist() == [sum(widths[: r + 1]) - 1 for r in rows.active]
    assert rows.is_uniform == (len(set(widths)) == 1) == (index is None)
    if index is None:
        return
    assert index.owners.tolist() == [r for r, w in enumerate(widths) for _ in range(w)]
    assert index.places.tolist() == [t for w in widths for t in range(w)]
    x = mx.arange(num * 2).reshape(-1, 2)
    padded = x[index.tokens].reshape(-1, 2)
    assert np.array_equal(np.asarray(padded[index.unpad]), np.asarray(x))
    for r, (row, taken) in enumerate(zip(np.asarray(index.tokens), np.asarray(index.valid), strict=True)):
        assert row[taken].tolist() == list(range(rows.starts[r], rows.starts[r + 1]))


def test_shapes_that_repeat() -> None:
    """Graphs are compiled by shape: the order of rows must not matter, and whatever else differs must show."""
    assert FlatRows((17, 1, 1)).shape == FlatRows((1, 17, 1)).shape
    assert FlatRows((4, 3, 1)).shape == FlatRows((2, 4, 2)).shape
    different = [(17, 1, 1), (16, 2, 1), (17, 2), (17, 1, 1, 0), (4, 4), (4, 4, 1), (8,), (4, 3), (19,)]
    assert len({FlatRows(w).shape for w in different}) == len(different)


@pytest.mark.parametrize("widths", [(), (0,), (0, 0), (2, -1)])
def test_a_forward_needs_a_token(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        FlatRows(widths)
