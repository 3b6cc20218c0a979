"""Acceptance and what of a draft is verified: pure functions, checked against what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.sampling.acceptance import match, num_verified

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


def verified(found: list[float], *, p_min: float, n_min: int) -> int:
    return num_verified(len(found), found, p_min=p_min, n_min=n_min)


@given(found=confidences, p_min=st.floats(0, 1), n_min=st.integers(0, 12))
def test_a_draft_ends_before_the_first_doubt_and_is_dropped_where_it_is_short(
    found: list[float], p_min: float, n_min: int
) -> None:
    length = verified(found, p_min=p_min, n_min=n_min)
    assert all(p >= p_min for p in found[:length])
    whole = verified(found, p_min=p_min, n_min=0)
    assert whole == len(found) or found[whole] < p_min
    assert length == (whole if whole >= n_min else 0)


@given(found=confidences)
def test_without_limits_all_is_verified(found: list[float]) -> None:
    assert verified(found, p_min=0.0, n_min=0) == len(found)


@given(found=confidences, p_min=st.floats(0, 1), n_min=st.integers(0, 12), data=st.data())
def test_stricter_limits_verify_no_more(
    found: list[float], p_min: float, n_min: int, data: st.DataObject
) -> None:
    stricter = data.draw(st.floats(p_min, 1))
    assert verified(found, p_min=stricter, n_min=n_min) <= verified(found, p_min=p_min, n_min=n_min)
    assert verified(found, p_min=p_min, n_min=n_min + 1) <= verified(found, p_min=p_min, n_min=n_min)


@given(length=st.integers(0, 9), n_min=st.integers(0, 12), valid=st.integers(0, 9))
def test_limits_do_not_apply_without_confidences_and_what_is_forbidden_ends_a_draft(
    length: int, n_min: int, valid: int
) -> None:
    found = num_verified(length, None, p_min=1.0, n_min=n_min, valid=lambda n: min(n, valid))
    assert found == min(length, valid)
    sure = num_verified(length, [1.0] * length, n_min=n_min, valid=lambda n: min(n, valid))
    assert sure == (found if found >= n_min else 0)
