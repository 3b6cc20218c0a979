"""Grammars for answers: JSON schema, regular expression or Lark, by llguidance (MIT, https://github.com/guidance-ai/llguidance).

A `Grammar` is one request's matcher. It advances by committed tokens only. Looking along a draft is undone before the next tokens come.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mlxspec.config import SamplingParams
from mlxspec.errors import GrammarError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.parsers.schema import Schema
from mlxspec.sampling.bits import Bits, num_words

# As `json.dumps` writes: models know it best, and with white space fixed most of what stands between values is forced. A schema's own
# "x-guidance" settings go before these.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


ROUND_SECONDS = 0.1
_CUTS_DRAFTS = 4  # a grammar that has used one part of so many of its share cuts its drafts
_MAX_STATES, _STATE_BYTES = 16_384, 2048  # of the lexer; llguidance says that one takes 1 to 2 kB
_GRAMMARS_KEPT = 4
_TEXT_FACTOR = 64  # bytes that a byte of a grammar comes to, compiled


def source_bytes(params: SamplingParams) -> int:
    """Return the bytes of a request's grammar as it was given. The request must have one. Raises GrammarError for a schema that is no
    JSON."""
    return len(_source(params)[1].encode())


def grammar_bytes(params: SamplingParams) -> int:
    """Return an upper bound of the bytes that the compiled grammar takes, whatever text it follows. The request must have one."""
    return source_bytes(params) * _TEXT_FACTOR + _MAX_STATES * _STATE_BYTES


class GrammarCompiler:
    """A maker of grammar matchers for one vocabulary. The last few are kept, because clients send the same tools and schemas with every
    request. They are kept by owner: otherwise the time to compile one would reveal whether another owner has sent it."""

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, str], Grammar] = OrderedDict()

    def compile(self, params: SamplingParams, owner: str = "") -> Grammar:
        """Return a matcher in its first state; `copy` it for each row. Raises GrammarError with the compiler's own message, also where
        the language has no text.

        May take seconds for a grammar of tens of kilobytes, most of them without Python's lock. May be called in any thread.
        """
        from llguidance import LLMatcher, LLParserLimits

        what, text = _source(params)
        key = owner, what, text
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        limits = LLParserLimits(max_lexer_states=_MAX_STATES)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"The {what} cannot be used: {_first_line(matcher.get_error())}.")
        grammar = Grammar(matcher, self._vocabulary)
        try:  # the first mask is the dearest, and tells whether any text is of the language
            grammar.mask()
            grammar.forced()
        except GrammarError as error:
            raise GrammarError(f"The {what} cannot be used: {grammar.trouble}.") from error
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > _GRAMMARS_KEPT:
                self._kept.popitem(last=False)
        return grammar

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        eos = sorted(self._vocabulary.eos_ids)
        if not eos:
            raise GrammarError("This model has no token that ends a text, so no grammar can end.")
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._vocabulary, eos[0])),
            n_vocab=len(self._vocabulary.tokens),
            eos_token=eos,
        )


class _Vocabulary:
    """A vocabulary with the interface that llguidance requires."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenBytes, eos: int) -> None:
        self._encode = vocabulary.encode_plain
        self.eos_token_id = eos
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special | vocabulary.eos_ids)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # how the wrapper finds out what it may pass
        return self._encode(text)


class RoundClock:
    """The processor time that the grammars of all rows take of the engine's thread in one round.

    A grammar's cost for each token can grow with its text, and llguidance bounds steps but no time. When a round's grammars have used
    ROUND_SECONDS, the grammar that has used more than its share of them ends, and its row with it; the other rows go on.
    """

    def __init__(self, seconds: float = ROUND_SECONDS) -> None:
        self._seconds = seconds
        self._left = self._share = seconds
        self._used: dict[int, float] = {}

    def begin(self, num_rows: int) -> None:
        """Begin a round of num_rows rows."""
        self._left, self._share = self._seconds, self._seconds / max(1, num_rows)
        self._used.clear()

    def charge(self, grammar: Grammar, seconds: float) -> None:
        self._left -= seconds
        self._used[id(grammar)] = self._used.get(id(grammar), 0.0) + seconds

    def is_costly(self, grammar: Grammar) -> bool:
        """Return whether this grammar has used so much of its share of the round that its draft should be cut here."""
        return self._used.get(id(grammar), 0.0) > self._share / _CUTS_DRAFTS

    def check(self, grammar: Grammar) -> None:
        """Raise GrammarError where this grammar must end."""
        if self._left <= 0 and self._used.get(id(grammar), 0.0) > self._share:
            raise GrammarError(
                "The grammar takes too long to apply at this place of the text: it is too ambiguous or too large."
            )


class LateClock(RoundClock):
    """A RoundClock among ranks: a grammar that must end is only marked as overdue, and its row ends with rank 0's next orders.
    Ranks that ended it by their own clocks would not end it alike."""

    def charge(self, grammar: Grammar, seconds: float) -> None:
        super().charge(grammar, seconds)
        try:
            super().check(grammar)
        except GrammarError as error:
            grammar.overdue = str(error)

    def is_costly(self, grammar: Grammar) -> bool:
        return False

    def check(self, grammar: Grammar) -> None:
        return None


class Grammar:
    """The grammar matcher of one request. Every method except the properties raises GrammarError where the matcher gives up."""

    def __init__(self, matcher: Any, vocabulary: TokenBytes, clock: RoundClock | None = None) -> None:
        """Wrap llguidance's matcher. clock: measures the grammar's time in a round; None: its time is not limited."""
        self._matcher, self._vocabulary, self._clock = matcher, vocabulary, clock
        self.overdue: str | None = None  # why it must end, where its clock only marks it
        self.num_tokens = 0  # consumed
        self._num_words = num_words(len(vocabulary.tokens))

    def copy(self, clock: RoundClock | None = None) -> Grammar:
        """Return a copy of this matcher in the same state. clock: that of the copy; None: the same. The compiled grammar is shared."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary, clock or self._clock)

    @property
    def is_finished(self) -> bool:
        """Return whether only the end of the answer may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def is_costly(self) -> bool:
        """Return whether the grammar has used so much of its time in this round that a draft should be cut here. Plain decoding goes on."""
        return self._clock is not None and self._clock.is_costly(self)

    def mask(self) -> Bits:
        """Return the tokens that may follow."""
        bits = np.frombuffer(self._timed(self._matcher.compute_bitmask), np.uint32)
        return bits[: self._num_words]

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, the grammar allows."""
        return int(self._timed(self._matcher.validate_tokens, list(tokens)))

    def forced(self) -> list[int]:
        """Return the tokens of the text that must follow; none where there is a choice."""
        return list(self._timed(self._matcher.compute_ff_tokens))

    def consume(self, token: int) -> bool:
        """Advance by one token and return True; return False, unchanged, if the token is not allowed."""
        is_taken = self.validate([token]) == 1 and bool(self._timed(self._matcher.consume_token, token))
        self.num_tokens += is_taken
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise GrammarError(
                f"The grammar's matcher could not go back: {_first_line(self._matcher.get_error())}."
            )
        self.num_tokens -= num_tokens

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._clock is not None:
            self._clock.check(self)
        started = time.thread_time()
        found = work(*args)
        if self._clock is not None:
            self._clock.charge(self, time.thread_time() - started)
        if self._matcher.is_error():
            raise GrammarError(f"The grammar cannot be applied any further: {self.trouble}.")
        return found

    @property
    def trouble(self) -> str:
        """Return the matcher's error message, without the state that it prints with it."""
        said = self._matcher.get_error().partition("<state>")[0]
        return _first_line(said) or "no text is of this language"


def _source(params: SamplingParams) -> tuple[str, str]:
    """Return the kind of a request's grammar in words, and the grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if params.regex is not None:
        return "regular expression", LLMatcher.grammar_from_regex(params.regex)
    if params.lark is not None:
        return "Lark grammar", LLMatcher.grammar_from_lark(params.lark)
    schema = params.json_schema
    try:
        given = dict(schema) if isinstance(schema, Mapping) else json.loads(str(schema))
        if not isinstance(given, dict | bool):
            raise TypeError("it is no JSON object")
        read = Schema(given)
        text = json.dumps(read.json(), allow_nan=False)
    except (GrammarError, ValueError, TypeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else _first_line(str(error))
        raise GrammarError(f"The JSON schema cannot be used: {why}.") from error
    if read.left_out:
        raise GrammarError(
            f"The JSON schema cannot be used: {read.left_out[0].place} cannot be enforced by a grammar; leave it out."
        )
    return "JSON schema", LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip().rstrip(".:")[:300] if lines else ""
