"""Padding and unpadding the flat token axis."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels.flat import FlatRows, pad_rows, unpad_rows

widths = st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(widths=widths)
def test_padding_there_and_back_is_nothing(widths: list[int]) -> None:
    rows = FlatRows(tuple(widths))
    x = mx.arange(rows.num_tokens * 2).reshape(-1, 2)
    padded = pad_rows(x, rows.num_rows, rows.index)
    assert padded.shape == (len(widths), max(widths), 2)
    for r, width in enumerate(widths):
        wanted = np.asarray(x)[rows.starts[r] : rows.starts[r] + width]
        assert np.array_equal(np.asarray(padded[r, :width]), wanted)
    assert np.array_equal(np.asarray(unpad_rows(padded, rows.index)), np.asarray(x))
    assert rows.active == [r for r, w in enumerate(widths) if w]
    assert rows.last_indices.tolist() == [sum(widths[: r + 1]) - 1 for r in rows.active]
    assert rows.is_uniform == (len(set(widths)) == 1)


@pytest.mark.parametrize("widths", [(), (0,), (0, 0), (2, -1)])
def test_a_forward_needs_a_token(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        FlatRows(widths)
