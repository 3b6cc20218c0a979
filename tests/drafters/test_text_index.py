"""The index over finished texts: against a search through all of them, its bounds, its owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product, takewhile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.drafters import text_index
from mlxspec.drafters.text_index import (
    ANCHORS,
    CONTEXT,
    PLACES,
    SMALLEST,
    STEPS,
    TextIndex,
    TextSegment,
    hash_of,
)

PLENTY = 8 << 20  # bytes
LONG, SHORT = ANCHORS


def agreeing(text: Sequence[int], end: int, tail: Sequence[int]) -> int:
    """How many tokens before `end` are the last ones of `tail`, CONTEXT at most."""
    count = 0
    while count < min(end, len(tail), CONTEXT) and text[end - 1 - count] == tail[-1 - count] >= 0:
        count += 1
    return count


def searched(texts: Sequence[Sequence[int]], tail: Sequence[int]) -> tuple[int, list[list[int]]]:
    """The twin: every place of every text is compared. Length of the longest suffix, and what followed it up to the next border, latest
    first."""
    for n in ANCHORS:
        places = [
            (agreeing(text, end, tail), text, end)
            for text in reversed(texts)
            for end in range(len(text) - 1, n - 1, -1)
            if agreeing(text, end, tail) >= n
        ][:PLACES]
        if places:
            most = max(length for length, _, _ in places)
            return most, [
                list(takewhile(lambda token: token >= 0, text[end:]))
                for length, text, end in places
                if length == most
            ]
    return 0, []


TOKENS = st.lists(st.sampled_from([0, 1, 2, 0, 1, 2, 0, 1, 2, -1, -(2**61)]), min_size=20, max_size=90)


@catches(
    "places are compared by their last token alone",
    "mlxspec.drafters.text_index:TextSegment.agreeing",
    lambda right: lambda self, place, tail: SHORT,
)
@settings(max_examples=150, deadline=None)
@example(texts=[[*[0] * 13, 1, 0, 0, 0, 0, 1, -1]], rest=[0, 1, *[0] * 18], cut=2, whose=0)
@given(texts=st.lists(TOKENS, max_size=5), rest=TOKENS, cut=st.integers(0, 60), whose=st.integers(0, 5))
def test_finds_what_a_search_finds(texts: list[list[int]], rest: list[int], cut: int, whose: int) -> None:
    """Of few different tokens, so that links reach far: the twin searches what links can reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "STEPS", 1000)
        index, stored = TextIndex(PLENTY), []
        for text in texts:
            kept = add(index, "", text)
            stored += [kept] if kept else []
        tail = [*(texts[whose % len(texts)] if texts else [])[: cut + 1], *rest[: cut % 7]]
        found = index.find("", tail, 12)
    length, said = searched(stored, tail)
    if not said:
        assert found is None
        return
    assert found is not None
    assert found.length == length
    assert found.tokens == voted(said, found.confidences)
    assert all(0 < p < 1 for p in found.confidences)
    assert np.prod(found.confidences) >= 0.25


def voted(said: Sequence[Sequence[int]], confidences: Sequence[float]) -> list[int]:
    """The twin's tokens, as many as there are confidences: what most of those said that had won so far."""
    tokens: list[int] = []
    while len(tokens) < len(confidences):
        left = [s for s in said if list(s[: len(tokens)]) == tokens and len(s) > len(tokens)]
        counts = Counter(s[len(tokens)] for s in left)
        tokens.append(counts.most_common(1)[0][0])
    return tokens


def add(index: TextIndex, owner: str, text: Sequence[int]) -> list[int]:
    """Index a text to its end. Returns what of it was stored."""
    stored: list[int] = []
    index.keep = lambda owner, piece: stored.extend(piece.tolist())
    index.add(owner, text)
    while index.has_work:
        index.work()
    return stored


def random_text(seed: int, length: int = 400, most: int = 900) -> list[int]:
    return np.random.default_rng(seed).integers(0, most, length).tolist()


def test_a_text_said_again_is_drafted_at_once_among_texts_that_end_alike() -> None:
    """The template's tokens before an answer are those of every conversation, more of them than places are compared."""
    index, template = TextIndex(PLENTY), list(range(1000, 1009))
    for i in range(3 * STEPS):
        add(index, "", [*random_text(i, 30), *template, *random_text(100 + i, 40)])
    found = index.find("", [*random_text(3, 30), *template], 20)
    assert found is not None
    assert found.tokens == random_text(103, 40)[:20]
    assert found.length == 39


def test_the_more_agree_the_longer_the_draft() -> None:
    index, text = TextIndex(PLENTY), random_text(1)
    add(index, "", text)
    drafted = [len(index.find("", text[100 - n : 100], 63).tokens) for n in (4, 8, 16, 32, 64)]  # type: ignore[union-attr]
    assert drafted == sorted(set(drafted)), drafted
    assert drafted[0] < 10 < 40 < drafted[-1]


def test_the_frequent_continuation_wins_and_doubt_ends_the_draft() -> None:
    index, begin = TextIndex(PLENTY), [1, 2, 3, 4, 5]
    for i, rest in enumerate(([7, 8, 20], [7, 8, 21], [7, 8, 22], [9, 8, 23])):
        add(index, "", [100 + i, *begin, *rest, 30])
    found = index.find("", [99, *begin], 9)
    assert found is not None
    assert found.tokens[:2] == [7, 8]
    assert len(found.tokens) <= 3
    assert found.confidences[0] < found.confidences[1]


@catches(
    "all owners share their texts",
    "mlxspec.drafters.text_index:TextIndex.find",
    lambda right: lambda self, owner, text, limit: right(self, "a", text, limit),
)
def test_owners_never_see_each_others_texts() -> None:
    index, text = TextIndex(PLENTY), random_text(1)
    add(index, "a", text)
    assert index.find("b", text[:50], 9) is None
    assert index.find("", text[:50], 9) is None
    add(index, "b", [*text[:48], 5, 6, 7, 8])
    assert index.find("b", text[:48], 3).tokens == [5, 6, 7]  # type: ignore[union-attr]
    assert index.find("a", text[:48], 3).tokens == text[48:51]  # type: ignore[union-attr]


def test_a_beginning_is_stored_once() -> None:
    index, turns = TextIndex(PLENTY), random_text(1, 2000)
    assert add(index, "", turns[:1000]) == turns[:1000]
    assert add(index, "", turns[:1000]) == []
    again = add(index, "", turns)
    assert again == turns[2000 - len(again) :]
    assert 1000 <= len(again) <= 1000 + 2 * CONTEXT, "what is new, and a context"
    assert index.find("", turns[900:1010], 9).tokens == turns[1010:1019]  # type: ignore[union-attr]


@catches(
    "nothing is ever let go of",
    "mlxspec.drafters.text_index:TextIndex._shrink",
    lambda right: lambda self, latest: None,
)
def test_memory_is_bounded_and_old_texts_of_idle_owners_go_first() -> None:
    index = TextIndex(4 << 20)
    first = random_text(0)
    add(index, "idle", first)
    for i in range(200):
        add(index, "busy", random_text(1 + i, 5000))
        assert index.nbytes <= 4 << 20
    assert index.find("idle", first[:100], 9) is None
    assert index.find("busy", random_text(200, 5000)[:100], 5).tokens == random_text(200, 5000)[100:105]  # type: ignore[union-attr]
    add(index, "busy", random_text(999, 300_000))  # longer than a segment
    assert index.nbytes <= 4 << 20
    assert (
        index.find("busy", random_text(999, 300_000)[-200:-100], 5).tokens
        == random_text(999, 300_000)[-100:-95]
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("budget", [0, 100, 10_000])
def test_nothing_is_kept_where_there_is_no_room(budget: int) -> None:
    index = TextIndex(budget)
    assert add(index, "", random_text(1)) in ([], random_text(1)[-64:], random_text(1))
    assert index.nbytes <= budget


@catches(
    "links are followed to the end",
    "mlxspec.drafters.text_index:STEPS",
    lambda right: 1 << 30,
)
def test_steps_of_a_lookup_do_not_grow_with_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst text: an n-gram stands once, and another one that has the same slot very often behind it."""
    often, num_bits = [1, 2, 3, 4], SMALLEST.bit_length() - 1
    slot = hash_of(often) >> (64 - num_bits)
    once = next(g for g in product(range(10, 40), repeat=4) if hash_of(g) >> (64 - num_bits) == slot)
    compared, agreeing = [], TextSegment.agreeing
    monkeypatch.setattr(
        TextSegment, "agreeing", lambda self, *args: compared.append(args) or agreeing(self, *args)
    )
    for num in (1, 100, 10_000):
        index = TextIndex(64 << 20)
        add(index, "", [*once, 5, *[*often, 6] * num])
        compared.clear()
        found = index.find("", [9, *once], 20)
        assert (found is not None) == (num < STEPS)
        assert len(compared) == min(num + 1, STEPS)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(65, 400), cut=st.integers(1, 300))
def test_a_text_in_pieces_is_indexed_as_it_is_at_once(seed: int, length: int, cut: int) -> None:
    """Pieces of 64 tokens, and one of all: the same places behind each n-gram, and the same beginnings known."""
    first, second = random_text(seed, length, most=3), random_text(seed, length + cut, most=3)
    second[length // 2] = -1
    found = []
    for piece in (64, 1 << 12):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_index, "PIECE", piece)
            index = TextIndex(PLENTY)
            stored = [add(index, "", text) for text in (first, second, first, second)]
        tails = [text[:end] for text in (first, second) for end in range(4, len(text), 7)]
        found.append((stored, [index.find("", tail, 20) for tail in tails]))
    assert found[0] == found[1]


@catches(
    "a text is indexed as a whole",
    "mlxspec.drafters.text_index:PIECE",
    lambda right: 1 << 20,
)
def test_no_step_indexes_more_than_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds follow from tokens: what a step of the engine may take is counted in them."""
    sizes, extend = [], TextSegment.extend
    monkeypatch.setattr(
        TextSegment, "extend", lambda self, piece: sizes.append(len(piece)) or extend(self, piece)
    )
    index, text = TextIndex(64 << 20), random_text(1, 100_000)
    index.add("", text)
    held = index.segment_of(text, 8)
    index.add("", random_text(2, 100))
    done = [index.work()]
    assert index.find("", text[50_000:50_100], 4) is None, "the beginning alone is known"
    while index.has_work:
        done.append(index.work())
    assert max(done) < 2 * text_index.PIECE
    assert max(sizes) <= text_index.PIECE
    assert sum(done) >= 300_000
    assert index.find("", text[50_000:50_100], 4).tokens == text[50_100:50_104]  # type: ignore[union-attr]
    assert held.end == 64 + 100_001
    index.segment_of(text, 8)  # which nobody holds
    assert index.work() == 0
    assert not index.has_work
