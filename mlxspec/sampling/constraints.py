"""The tokens allowed next in one answer, by its grammar, bad words and thinking budget together, at every position of a draft.

This is host work on token ids, so the draft must be known on the host. Only committed tokens change the state. Looking along a draft
leaves it unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError, GrammarError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.parsers.formats import detect
from mlxspec.sampling import bits as bitsets
from mlxspec.sampling.bad_words import START, BadWords
from mlxspec.sampling.bits import Bits
from mlxspec.sampling.grammar import Grammar, GrammarCompiler, RoundClock, grammar_bytes
from mlxspec.sampling.loops import Loops
from mlxspec.sampling.thinking import Thinking, ThinkingState

_NO_TOKENIZER = "Without a tokenizer there are no grammars, bad words, thinking budgets, min_tokens or DRY."


class _State(NamedTuple):
    thinking: ThinkingState
    words: int  # where the forbidden words' automaton stands
    num: int = 0  # tokens of the answer


class Constraints:
    """One request's. `push` is told of every token of the answer but the end token."""

    def __init__(
        self,
        *,
        thinking: Thinking | None,
        words: BadWords | None,
        grammar: Grammar | None,
        prompt: Sequence[int],
        vocabulary: TokenBytes,
        ends: frozenset[int],
        least: int = 0,
    ) -> None:
        """ends: tokens that end the answer, none where the request ignores them. least: tokens that it has before one of these may come."""
        self._thinking, self._words, self._grammar = thinking, words, grammar
        self._ends, self._size, self._least = ends, vocabulary.size, least
        start = thinking.start(prompt) if thinking else ThinkingState("done")
        # what the model opens by itself, a grammar has forbidden already
        if grammar and start.phase == "waiting":
            start = ThinkingState("done")
        self._state = _State(start, START)
        # an answer whose grammar has not begun is not complete
        ends = frozenset(token for token in ends if token < self._size)
        self._all_but_ends = bitsets.all_but(ends, self._size) if grammar or least else None
        self._looked: tuple[list[int], list[Bits | None]] | None = (
            None  # the draft last looked along, and what was seen
        )
        self.num_forced = 0  # tokens of a closing tag

    @property
    def num_thinking(self) -> int:
        """Tokens of thinking so far."""
        return self._state.thinking.num_tokens

    def close_thinking(self, num: int, thinking: Thinking, state: ThinkingState) -> bool:
        """Force the closing tag `num` tokens from here. False where thinking is not open, or its budget closes it before. thinking and
        state: of the text so far, for rows whose thinking nobody watched."""
        if self._thinking is None:
            self._thinking, self._state = thinking, self._state._replace(thinking=state)
        now, budget = self._state.thinking, self._thinking.budget
        place = now.num_tokens + num
        if now.phase != "open" or (budget is not None and budget <= place):
            return False
        self._thinking.budget = place
        return True

    @property
    def is_finished(self) -> bool:
        """The grammar allows nothing more: the answer is complete."""
        return self._grammar is not None and self._is_grammar_on(self._state) and self._grammar.is_finished

    @property
    def overdue(self) -> str | None:
        """Why the row must end, where its grammar has taken too long and could not end it by itself."""
        return None if self._grammar is None else self._grammar.overdue

    def reaches(self, width: int) -> bool:
        """Whether anything may be forbidden at one of the next `width` places, whatever comes before it."""
        if self._words is not None or self._grammar is not None or self._state.num < self._least:
            return True
        return self._thinking is not None and self._thinking.reaches(self._state.thinking, width)

    def masks(self, draft: Sequence[int]) -> list[Bits | None]:
        """The tokens that may come at each place along a draft, and behind it: len(draft) + 1 sets, None for anything.

        Behind a token that may not come, or one that ends the answer, anything may: no token there is accepted.
        """
        draft = list(draft)
        if self._looked is None or self._looked[0][: len(draft)] != draft:
            self._looked = draft, self._look(draft)[0]
        return self._looked[1][: len(draft) + 1]

    def _look(self, draft: list[int], *, may_cut: bool = False) -> tuple[list[Bits | None], int]:
        """The sets of `masks`, and how many tokens of the draft have been looked at: with may_cut fewer, if the grammar costs too much."""
        found: list[Bits | None] = []
        state, consumed = self._state, 0
        for place, token in enumerate(draft):
            mask = self._mask(state)
            found.append(mask)
            if may_cut and self._grammar is not None and self._grammar.is_costly:
                draft = draft[:place]
                break
            if token in self._ends or (mask is not None and not bitsets.holds(mask, token)):
                break
            if self._grammar is not None and self._is_grammar_on(state):
                if not self._grammar.consume(token):
                    break
                consumed += 1
            state = self._step(state, token)
        else:
            found.append(self._mask(state))
        if self._grammar is not None:
            self._grammar.rollback(consumed)
        return found + [None] * (len(draft) + 1 - len(found)), len(draft)

    def validate(self, draft: Sequence[int]) -> int:
        """How many of these tokens are worth a verify: those before the first forbidden one, and no more than the grammar has time for."""
        draft = list(draft)
        masks, length = self._look(draft, may_cut=True)
        draft = draft[:length]
        self._looked = draft, masks
        for length, (token, mask) in enumerate(zip(draft, masks, strict=False)):
            if mask is not None and not bitsets.holds(mask, token):
                return length
        return len(draft)

    def forced(self) -> list[int]:
        """Tokens there is no choice about, as far as anybody can tell now."""
        closing = self._thinking.forced(self._state.thinking) if self._thinking else []
        if closing or self._grammar is None or not self._is_grammar_on(self._state):
            return closing
        return self._grammar.forced()

    def push(self, token: int) -> bool:
        """A token of the answer. False if nothing allowed was left to choose, and this was not allowed either."""
        own = self._own_mask(self._state)
        if own is not None and not bitsets.holds(own, token):
            return False
        if (
            self._grammar is not None
            and self._is_grammar_on(self._state)
            and not self._grammar.consume(token)
        ):
            return False
        self.num_forced += self._state.thinking.phase == "closing"
        self._state, self._looked = self._step(self._state, token), None
        return True

    def _is_grammar_on(self, state: _State) -> bool:
        return state.thinking.phase == "done"

    def _own_mask(self, state: _State) -> Bits | None:
        """Tokens that forced ones and forbidden words leave; while a grammar waits for the end of thinking, no end token."""
        forced = self._thinking.forced(state.thinking) if self._thinking else []
        if forced:
            return bitsets.only(forced[:1], self._size)
        mask = self._words.mask(state.words) if self._words else None
        may_end = state.num >= self._least and (self._grammar is None or self._is_grammar_on(state))
        return mask if may_end else _both(mask, self._all_but_ends)

    def _mask(self, state: _State) -> Bits | None:
        mask = self._own_mask(state)
        if self._grammar is None or not self._is_grammar_on(state):
            return mask
        return _both(mask, self._grammar.mask())

    def _step(self, state: _State, token: int) -> _State:
        thinking = self._thinking.step(state.thinking, token) if self._thinking else state.thinking
        words = self._words.step(state.words, token) if self._words else START
        return _State(thinking, words, state.num + 1)


def ends_of(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end an answer."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)


def _may_close(thinking: Thinking, params: SamplingParams) -> bool:
    """Whether allowed_token_ids leave the closing tag's tokens."""
    return not params.allowed_token_ids or set(thinking.closing) <= set(params.allowed_token_ids)


def _both(one: Bits | None, other: Bits | None) -> Bits | None:
    """The tokens that both allow; None allows anything."""
    if one is None or other is None:
        return other if one is None else one
    return np.bitwise_and(one, other)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The part of a request's constraints that takes long to make. Several rows may share it. breaks: tokens with one of DRY's breakers.
    nbytes: an upper bound of its share of a row."""

    words: BadWords | None = None
    grammar: Grammar | None = None
    breaks: NDArray[np.bool_] | None = None
    nbytes: int = 0


class ConstraintMaker:
    """Makes them for one model; what depends on the vocabulary alone is made once, when first needed. clock: what grammars' time in the
    engine's thread is charged to."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self.clock = RoundClock()

    def compile(self, params: SamplingParams, num_rows: int = 1, owner: str = "") -> Compiled:
        """For num_rows rows of this owner that have these parameters. May be called in any thread, and take seconds. Raises
        GrammarError, and ConfigError without a tokenizer."""
        if params.wants_logprobs and self._tokenizer is not None:
            self._prepare_vocabulary()
        if not (params.has_grammar or params.bad_words or params.dry_multiplier):
            return Compiled()
        if self._tokenizer is None:
            raise ConfigError(_NO_TOKENIZER)
        self._prepare_vocabulary()
        words = BadWords(params.bad_words, self.vocabulary) if params.bad_words else None
        grammar = self._compiler.compile(params, owner) if params.has_grammar else None
        if words is not None and grammar is not None and not np.any(words.mask(START) & grammar.mask()):
            raise GrammarError("No text is both of this grammar and without the bad words.")
        breaks = self._breaks(params) if params.dry_multiplier else None
        nbytes = grammar_bytes(params) + (0 if words is None else words.nbytes)
        return Compiled(words=words, grammar=grammar, breaks=breaks, nbytes=-(-nbytes // num_rows))

    def _breaks(self, params: SamplingParams) -> NDArray[np.bool_]:
        found = [text.encode() for text in params.dry_sequence_breakers]
        return np.array([any(text in token for text in found) for token in self.vocabulary.tokens])

    def constraints_for(
        self, params: SamplingParams, prompt: Sequence[int], compiled: Compiled | None = None
    ) -> Constraints | None:
        """None where nothing is constrained. compiled: of these parameters; None: do it here. Raises as `compile` does."""
        watches = params.has_grammar or params.thinking_budget is not None
        if not (watches or params.bad_words or params.min_tokens):
            return None
        if self._tokenizer is None:
            raise ConfigError(_NO_TOKENIZER)
        compiled = compiled or self.compile(params)
        thinking = self._thinking(params, params.thinking_budget) if watches else None
        if thinking is not None and params.thinking_budget is not None and not _may_close(thinking, params):
            raise ConfigError(
                "thinking_budget and allowed_token_ids contradict each other: the closing tag of thinking_tags has other tokens."
            )
        return Constraints(
            thinking=thinking,
            words=compiled.words,
            grammar=None if compiled.grammar is None else compiled.grammar.copy(self.clock),
            prompt=prompt,
            vocabulary=self.vocabulary,
            ends=ends_of(params, self.vocabulary.eos_ids),
            least=params.min_tokens,
        )

    def loops_for(self, params: SamplingParams, prompt: Sequence[int]) -> Loops | None:
        """None where nothing is looked for: it is off, or thinking is all that it looks at and there will be none."""
        if params.loop_breaker == "off" or self._tokenizer is None:
            return None
        opens = self._thinking_tags == params.thinking_tags
        thinking = self._thinking(params, None)
        if thinking is not None and not _may_close(thinking, params):
            thinking = None
        is_free = not (params.has_grammar or params.ignore_eos or params.min_tokens)
        ends = params.loop_breaker == "all" or (params.loop_breaker is None and is_free)
        loops = Loops(thinking, prompt, opens=opens, ends=ends)
        return loops if loops.is_on else None

    def unconstrained(self) -> Constraints:
        """Constraints of a row that is to have some later."""
        return Constraints(
            thinking=None, words=None, grammar=None, prompt=(), vocabulary=self.vocabulary, ends=frozenset()
        )

    @cached_property
    def _thinking_tags(self) -> tuple[str, str] | None:
        """Tags in the chat template; None for a model that does not think."""
        template = None if self._tokenizer is None else self._tokenizer.template
        return None if template is None else detect(template.source).thinking

    def _prepare_vocabulary(self) -> None:
        """One thread at a time: for a large vocabulary it takes a good part of a second."""
        with self._lock:
            _ = self._compiler, self.vocabulary.sorted_bytes

    def _thinking(self, params: SamplingParams, budget: int | None) -> Thinking | None:
        try:
            return Thinking(params.thinking_tags, budget, self.vocabulary)
        except ConfigError:
            if budget is not None:
                raise
            return None  # a model that cannot close thinking has not opened it

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """Bytes by token id; all empty without a tokenizer."""
        return (b"",) * self._size if self._tokenizer is None else self.vocabulary.tokens

    @cached_property
    def vocabulary(self) -> TokenBytes:
        if self._tokenizer is None:
            raise ConfigError("Without a tokenizer tokens have no bytes.")
        return TokenBytes(self._tokenizer, self._size)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.vocabulary)
