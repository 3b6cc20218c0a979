"""ngram-map-k and ngram-map-k4v: hand-written cases, and drafts against a search through the whole history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.drafters.ngram_map import MAX_VOTES, MapK4vRow, MapKRow, Trust, continuation

TEXT = st.lists(st.integers(0, 2), max_size=40)
A, B, C = [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]
KEY = [1, 2, 3]


def text_of(*values: list[int]) -> list[int]:
    """KEY followed by each value in turn, a token of its own behind each, and KEY at the end."""
    tokens: list[int] = []
    for i, value in enumerate(values):
        tokens += [*KEY, *value, 90 + i]
    return tokens + KEY


def k(text: list[int], *, n: int = 3, m: int = 4, min_hits: int = 1) -> MapKRow:
    row = MapKRow(n, m, min_hits)
    row.extend(text)
    return row


def k4v(text: list[int], *, n: int = 3, m: int = 4, min_hits: int = 1) -> MapK4vRow:
    row = MapK4vRow(n, m, min_hits)
    row.extend(text)
    return row


def ends(text: list[int], n: int) -> list[int]:
    """Where the last n tokens have stood before, latest first: indices behind them."""
    return (
        [e for e in range(len(text) - 1, n - 1, -1) if text[e - n : e] == text[len(text) - n :]]
        if len(text) > n
        else []
    )


def round_trip(text: list[int], start: int, length: int) -> list[int]:
    """What follows `start`, the text being continued by what follows."""
    longer = list(text)
    for i in range(length):
        longer.append(longer[start + i])
    return longer[len(text) :]


class TestMapK:
    def test_the_latest_occurrence_is_continued(self) -> None:
        assert k(text_of(A, B)).draft(4).tokens == B
        assert k(text_of(B, A)).draft(4).tokens == A

    def test_nothing_without_an_occurrence(self) -> None:
        assert k([]).draft(4).length == 0
        assert k([1, 2]).draft(4).length == 0
        assert k([1, 2, 3]).draft(4).length == 0
        assert k([1, 2, 3, 4, 1, 2, 4]).draft(4).length == 0

    def test_the_newest_tokens_are_found(self) -> None:
        """No lag: an n-gram that ended one token ago counts."""
        assert k([5, 5, 5, 5]).draft(4).tokens == [5, 5, 5, 5]

    def test_a_repeating_pattern_is_drafted_at_full_length(self) -> None:
        assert k([7, 8, 9] * 2, n=3, m=8).draft(8).tokens == [7, 8, 9, 7, 8, 9, 7, 8]

    @pytest.mark.parametrize(("min_hits", "expected"), [(1, B), (2, B), (3, [])])
    def test_min_hits_is_what_it_says(self, min_hits: int, expected: list[int]) -> None:
        assert k(text_of(A, B), min_hits=min_hits).draft(4).tokens == expected

    def test_a_failed_key_drafts_what_stood(self) -> None:
        row = k(text_of(A))
        assert row.draft(4).tokens == A
        row.extend([10, 11, 99, 98, *KEY])
        assert row.draft(4).tokens == [10, 11]

    def test_a_key_is_never_silenced_and_grows_back(self) -> None:
        row = k(text_of(A), m=8)
        row.draft(4)
        row.extend([99, 98, 97, 96, 95, 94, 93, 92, *KEY])  # nothing of A stood
        lengths = []
        for _ in range(5):
            draft = row.draft(8)
            lengths.append(draft.length)
            row.extend([99, 98, 97, 96, 95, 94, 93, 92, *KEY])
        assert lengths == [1, 2, 4, 8, 8]

    def test_keys_are_judged_apart(self) -> None:
        row = k([1, 2, 3, 10, 11, 4, 5, 6, 20, 21, 7, 1, 2, 3], m=2)
        row.draft(2)
        row.extend([99, 4, 5, 6])
        assert row.draft(2).tokens == [20, 21]

    def test_a_draft_somebody_else_made_room_for_is_judged_by_the_text(self) -> None:
        """Rounds without this drafter's draft: its proposal stood, as the text shows."""
        row = k(text_of(A))
        row.draft(4)
        for token in [10, 11, 99]:
            row.extend([token])
        row.extend([98, *KEY])
        assert row.draft(4).length == 2

    @settings(max_examples=200, deadline=None)
    @given(text=TEXT, n=st.integers(1, 4), m=st.integers(1, 9), min_hits=st.integers(1, 3))
    def test_like_a_search(self, text: list[int], n: int, m: int, min_hits: int) -> None:
        found = ends(text, n)
        expected = round_trip(text, found[0], m) if len(found) >= min_hits else []
        assert k(text, n=n, m=m, min_hits=min_hits).draft(20).tokens == expected


class TestMapK4v:
    def test_the_frequent_value_wins_over_the_latest(self) -> None:
        draft = k4v(text_of(A, A, B)).draft(4)
        assert draft.tokens == A
        assert draft.confidences == [2.5 / 4, 2.5 / 3, 2.5 / 3, 2.5 / 3]

    def test_a_value_must_be_twice_as_frequent_as_all_others(self) -> None:
        assert k4v(text_of(A, B)).draft(4).length == 0
        assert k4v(text_of(A, A, B)).draft(4).tokens == A
        assert k4v(text_of(A, A, B, C)).draft(4).length == 0
        assert k4v(text_of(A, A, A, A, B, C)).draft(4).tokens == A
        assert k4v(text_of(A, A, A, B, B)).draft(4).length == 0

    def test_a_fifth_value_counts_against_the_winner(self) -> None:
        others = [[40 + i, 1, 1, 1] for i in range(5)]
        assert k4v(text_of(*[A] * 9, *others)).draft(4).length == 0
        assert k4v(text_of(*[A] * 10, *others)).draft(4).tokens == A

    def test_a_single_occurrence_counts_once(self) -> None:
        draft = k4v(text_of(A)).draft(4)
        assert draft.tokens == A
        assert draft.confidences == [0.75] * 4

    def test_the_draft_ends_where_they_part(self) -> None:
        draft = k4v(text_of([10, 11, 12], [10, 11, 99])).draft(4)
        assert draft.tokens == [10, 11]
        assert draft.confidences == [2.5 / 3] * 2

    @pytest.mark.parametrize(("min_hits", "length"), [(1, 4), (3, 4), (4, 0)])
    def test_min_hits_is_what_it_says(self, min_hits: int, length: int) -> None:
        assert k4v(text_of(A, A, A), min_hits=min_hits).draft(4).length == length

    def test_old_occurrences_lose_their_vote(self) -> None:
        assert k4v(text_of(*[A] * 20, *[B] * MAX_VOTES)).draft(4).tokens == B

    def test_values_are_judged_apart(self) -> None:
        row = k4v(text_of(A, A, A))
        assert row.draft(4).tokens == A
        row.extend([10, 99, 98, *KEY])
        assert row.draft(4).tokens == [10], "of A one token stood"
        for i in range(9):
            row.extend([*B, 80 + i, *KEY])
        assert row.draft(4).tokens == B, "B never failed"

    @settings(max_examples=200, deadline=None)
    @given(text=TEXT, n=st.integers(1, 3), m=st.integers(1, 9), min_hits=st.integers(1, 3))
    def test_like_a_search(self, text: list[int], n: int, m: int, min_hits: int) -> None:
        found = ends(text, n)
        tokens: list[int] = []
        voters = found[:MAX_VOTES] if len(found) >= min_hits else []
        while voters and len(tokens) < m:
            longer = text + tokens
            said = [longer[e + len(tokens)] for e in voters]
            best = max(said, key=said.count)
            if said.count(best) < 2 * sum(t != best for t in said):
                break
            voters = [e for e, t in zip(voters, said, strict=True) if t == best]
            tokens.append(best)
        assert k4v(text, n=n, m=m, min_hits=min_hits).draft(20).tokens == tokens


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=12), length=st.integers(1, 30), data=st.data())
def test_continuation_goes_round(text: list[int], length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    assert continuation(text, start, length) == round_trip(text, start, length)


class TestTrust:
    def test_the_rule(self) -> None:
        trust, key = Trust(16), (1, 2)
        assert trust.length(key) == 16
        trust.learn(key, accepted=5, proposed=16)
        assert trust.length(key) == 5
        trust.learn(key, accepted=2, proposed=2)  # a short draft says nothing against 5
        assert trust.length(key) == 5
        trust.learn(key, accepted=5, proposed=5)
        assert trust.length(key) == 10
        trust.learn(key, accepted=10, proposed=10)
        assert trust.length(key) == 16
        trust.learn(key, accepted=0, proposed=16)
        assert trust.length(key) == 1
