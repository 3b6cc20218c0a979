"""Acceptance and trimming: pure functions, checked against what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.sampling.acceptance import match, trim

tokens = st.integers(0, 3)
confidences = st.lists(st.floats(0, 1), max_size=10)


@given(drafted=st.lists(tokens, max_size=8), data=st.data())
def test_match_counts_the_common_beginning(drafted: list[int], data: st.DataObject) -> None:
    sampled = data.draw(st.lists(tokens, min_size=len(drafted) + 1, max_size=len(drafted) + 1))
    kept = match(drafted, sampled)
    assert drafted[:kept] == sampled[:kept]
    assert kept == len(drafted) or drafted[kept] != sampled[kept]


@given(text=st.lists(tokens, min_size=9, max_size=9), drafted=st.lists(tokens, max_size=8))
def test_what_is_emitted_does_not_depend_on_the_draft(text: list[int], drafted: list[int]) -> None:
    """A target that says `text` whatever it reads: accepted drafts and the round's own token are its beginning."""
    kept = match(drafted, text[: len(drafted) + 1])
    assert [*drafted[:kept], text[kept]] == text[: kept + 1]


@pytest.mark.parametrize(("drafted", "sampled"), [([1], [1]), ([], []), ([], [1, 2]), ([1, 2], [1, 2])])
def test_match_refuses_lengths_that_do_not_fit(drafted: list[int], sampled: list[int]) -> None:
    with pytest.raises(ValueError, match="samples"):
        match(drafted, sampled)


@given(found=confidences, p_min=st.floats(0, 1), n_min=st.integers(0, 12))
def test_trim_ends_before_the_first_doubt_and_drops_what_is_short(
    found: list[float], p_min: float, n_min: int
) -> None:
    length = trim(found, p_min=p_min, n_min=n_min)
    assert all(p >= p_min for p in found[:length])
    whole = trim(found, p_min=p_min, n_min=0)
    assert whole == len(found) or found[whole] < p_min
    assert length == (whole if whole >= n_min else 0)


@given(found=confidences)
def test_trim_without_limits_keeps_all(found: list[float]) -> None:
    assert trim(found, p_min=0.0, n_min=0) == len(found)


@given(found=confidences, p_min=st.floats(0, 1), n_min=st.integers(0, 12), data=st.data())
def test_trim_is_monotone(found: list[float], p_min: float, n_min: int, data: st.DataObject) -> None:
    stricter = data.draw(st.floats(p_min, 1))
    assert trim(found, p_min=stricter, n_min=n_min) <= trim(found, p_min=p_min, n_min=n_min)
    assert trim(found, p_min=p_min, n_min=n_min + 1) <= trim(found, p_min=p_min, n_min=n_min)
