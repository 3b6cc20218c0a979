"""What constraints may cost: forbidden words of any number and shape, and grammars whose masks get dearer with the text."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.errors import GrammarError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.sampling import bits
from mlxspec.sampling.bad_words import START, BadWords
from mlxspec.sampling.constraints import ConstraintMaker
from mlxspec.sampling.grammar import RoundClock
from tests import tiny_models
from tests.tiny_models import VOCAB


def _without_links(right: Any) -> Any:
    """A mask that knows the longest end of the text only."""

    def mask(self: BadWords, state: int) -> Any:
        links, self._links = self._links, [0] * len(self._links)
        try:
            return right(self, state)
        finally:
            self._links = links

    return mask


class Pieces(TokenBytes):
    """A vocabulary given by hand."""

    def __init__(self, pieces: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self.tokens, self.special = tuple(pieces), special


def forbidden(text: bytes, words: Sequence[bytes], token: bytes) -> bool:
    """The plain twin: whether a word ends in the token."""
    whole = text + token
    return any(whole.find(w, max(0, len(text) - len(w) + 1)) >= 0 for w in words)


@catches(
    "forbidden words that are shorter ends of the text are forgotten",
    "mlxspec.sampling.bad_words:BadWords.mask",
    _without_links,
)
def test_a_word_may_begin_within_another_one() -> None:
    """Behind "aa" both "aac" and "ab" have begun."""
    found, state = BadWords(["aac", "ab"], Pieces([b"a", b"b", b"c", b"<eos>"], frozenset({3}))), START
    for token in (0, 0):
        assert bits.holds(found.mask(state), token)
        state = found.step(state, token)
    assert [bits.holds(found.mask(state), token) for token in range(4)] == [True, False, False, True]


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("ab\xff", min_size=1, max_size=4), min_size=2, max_size=12, unique=True),
    words=st.lists(st.text("ab\xff", min_size=1, max_size=7), min_size=1, max_size=6),
    data=st.data(),
)
def test_tokens_are_forbidden_as_by_looking_at_the_whole_text(pieces, words, data) -> None:
    vocabulary = Pieces([p.encode("latin-1") for p in pieces] + [b"", b"<eos>"], frozenset({len(pieces) + 1}))
    found, raw = BadWords(words, vocabulary), [w.encode() for w in words]
    text, state = b"", START
    for _ in range(12):
        free = []
        for token in range(len(pieces)):
            is_free = not forbidden(text, raw, vocabulary.tokens[token])
            assert bits.holds(found.mask(state), token) == is_free, (text, vocabulary.tokens[token])
            free += [token] * is_free
        assert bits.holds(found.mask(state), len(pieces) + 1)  # what is no text ends no word
        if not free:
            return
        token = data.draw(st.sampled_from(free))
        text, state = text + vocabulary.tokens[token], found.step(state, token)


@pytest.mark.parametrize(
    "words",
    [
        [f"a{i:03}" + "b" * 28 for i in range(1000)],
        ["a" * 60 + chr(33 + i) for i in range(90)],
        ["a" * i + "b" for i in range(1, 250)],
        [chr(97 + i // 26) + chr(97 + i % 26) for i in range(676)],
        ["x" * 32_000],
    ],
    ids=["shared ends", "one long beginning", "ends in each other", "all pairs", "one"],
)
def test_what_words_take_is_bounded_by_their_bytes(words: list[str]) -> None:
    """States, ranges and bytes, however the words are chosen; a text that is inside many of them included."""
    vocabulary = ConstraintMaker(tiny_models.tokenizer(), VOCAB).vocabulary
    _ = vocabulary.sorted_bytes, vocabulary.joined, vocabulary.sorted_array
    size = sum(map(len, words))
    tracemalloc.start()
    try:
        found = BadWords(words, vocabulary)
        state = START
        for letter in "".join(words)[:2000]:  # through the words, whether they may be said or not
            found.mask(state)
            state = found.step(state, ord(letter) - 32)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(found._links) <= size + 1
    assert sum(map(len, found._ranges.values())) <= size
    assert len(found._masks) <= 64
    assert taken <= found.nbytes


@catches(
    "a grammar's time has no limit",
    "mlxspec.sampling.grammar:RoundClock.check",
    lambda right: lambda self, grammar: None,
)
def test_a_grammar_that_takes_too_long_in_a_round_ends_and_no_other() -> None:
    clock, maker = RoundClock(seconds=1.0), ConstraintMaker(tiny_models.tokenizer(), VOCAB)
    compiled = maker.compile(SamplingParams(regex="[ab]+"))
    dear, cheap = compiled.grammar.copy(clock), compiled.grammar.copy(clock)
    clock.begin(2)
    clock.charge(dear, 0.99)
    dear.mask()  # there is time left
    clock.charge(dear, 0.02)
    for _ in range(2):  # it stays that way for this round
        with pytest.raises(GrammarError, match="too long"):
            dear.mask()
    cheap.mask()
    clock.charge(cheap, 0.3)
    cheap.mask()  # beyond the round's time, but not beyond its share
    clock.charge(cheap, 0.3)
    with pytest.raises(GrammarError, match="too long"):
        cheap.consume(66)
    clock.begin(2)
    assert cheap.consume(66)


@pytest.mark.parametrize(
    "params",
    [
        {"regex": r"[^\s\S]"},
        {"json_schema": {"$ref": "#"}},
        {"lark": "start: start"},
        {"regex": "a+", "bad_words": ("a",)},
    ],
    ids=str,
)
def test_a_language_without_texts_is_an_error_of_the_request(params: dict) -> None:
    maker = ConstraintMaker(tiny_models.tokenizer(), VOCAB)
    with pytest.raises(GrammarError):
        maker.constraints_for(SamplingParams(**params), [1])


def test_what_was_compiled_serves_several_rows() -> None:
    maker = ConstraintMaker(tiny_models.tokenizer(), VOCAB)
    params = SamplingParams(regex="ab|cd", bad_words=("b",))
    compiled = maker.compile(params, num_rows=2)
    assert 2 * compiled.nbytes >= maker.compile(params).nbytes
    one, other = (maker.constraints_for(params, [1], compiled) for _ in range(2))
    assert one.push(ord("c") - 32)
    assert other.push(ord("a") - 32)
    assert not other.push(ord("b") - 32)
    assert one.push(ord("d") - 32)
    assert one.is_finished


def test_a_dear_grammar_cuts_its_drafts_before_it_ends() -> None:
    """With drafts or without, a row must come equally far in its text."""
    maker = ConstraintMaker(tiny_models.tokenizer(), VOCAB)
    made = maker.constraints_for(SamplingParams(regex="[ab]+"), [1])
    draft, charged = [66, 65] * 4, []

    class Dear(RoundClock):
        def charge(self, grammar, seconds: float) -> None:
            charged.append(1)
            super().charge(grammar, 0.004)

    made._call._clock = clock = Dear(seconds=0.1)
    clock.begin(1)
    length = made.validate(draft)
    assert 0 < length < len(draft)
    assert len(made.masks(draft[:length])) == length + 1
    assert len(charged) <= 8
    for token in draft[:length]:
        assert made.push(token)
    clock.begin(1)
    assert made.masks([])[0] is not None
