"""n-gram lookup against a search that scans the whole history every time, as the text grows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.drafters.base import Ask
from mlxspec.drafters.ngram_simple import NgramIndex, NgramSimple

pytestmark = pytest.mark.smoke

tokens = st.integers(0, 2)  # so few that everything repeats
pieces = st.lists(st.lists(tokens, max_size=8), max_size=12)


def search(history: list[int], n: int, limit: int) -> list[int]:
    """The latest place before the end where the last n tokens stand; what follows, going round where the text ends."""
    for end in range(len(history) - 1, n - 1, -1):
        if history[end - n : end] == history[len(history) - n :]:
            text = list(history)
            for i in range(limit):
                text.append(text[end + i])
            return text[len(history) :]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(n=st.integers(1, 4), text=pieces, limit=st.integers(1, 12))
def test_the_index_finds_what_a_search_finds(n: int, text: list[list[int]], limit: int) -> None:
    index, history = NgramIndex(n), []
    for piece in text:
        index.extend(piece)
        history += piece
        assert index.history == history
        assert index.find(limit) == search(history, n, limit)
        assert index.has_match == bool(index.find(limit))


def test_a_repeated_pattern_is_drafted_at_full_length() -> None:
    index = NgramIndex(3)
    index.extend([1, 2, 3, 4] * 3)
    assert index.find(9) == [1, 2, 3, 4, 1, 2, 3, 4, 1]


def test_rows_know_nothing_of_one_another() -> None:
    drafter = NgramSimple(2, 8)
    drafter.begin(0)
    drafter.begin(1)
    drafter.observe(0, [1, 2, 3, 1, 2], None)
    drafter.observe(1, [1, 2], None)
    assert drafter._rows[1].find(4) == []
    assert drafter._rows[0].find(2) == [3, 1]
    drafter.close(0)
    drafter.close(0)
    assert list(drafter._rows) == [1]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, 2), min_size=4, max_size=60), n=st.integers(1, 3))
def test_a_draft_says_how_far_back_its_place_agrees(tokens: list[int], n: int) -> None:
    index = NgramIndex(n)
    index.extend(tokens)
    if not index.has_match:
        return
    end = max(e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:])
    count = 0
    while end - n - 1 - count >= 0 and tokens[end - n - 1 - count] == tokens[len(tokens) - n - 1 - count]:
        count += 1
    assert index.backing == min(count, 40)
    drafter = NgramSimple(n, 4)
    drafter.begin(0)
    drafter.observe(0, tokens, None)
    assert drafter.propose([Ask(0, tokens, 4, None)], None)[0].backing == index.backing
