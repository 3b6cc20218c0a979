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
from mlxspec.sampling.opening import BeforeCall, Opening
from mlxspec.sampling.thinking import Thinking, ThinkingState

_NO_TOKENIZER = "Without a tokenizer there are no grammars, bad words, thinking budgets, min_tokens or DRY."


class _State(NamedTuple):
    """The state of an answer's constraints after its tokens so far.

    thinking: the state of the thinking budget. words: the state of the bad-words automaton. num: tokens of the answer.

    grammar: the grammar's state. It is in force once thinking is done and, where a tag opens the grammar, once the tag is complete. Where a
    tag opens it, it is None until the text may begin the tag, and advances along the tag from there. seen: the text before that tag; None
    where the grammar is that of the whole answer.

    lead: how many tokens of the opening tag of thinking the answer has begun with, while it may still become that tag or a text of the
    grammar; else None. While it is set, grammar is None where the answer's beginning fits the tag only.
    """

    thinking: ThinkingState
    words: int
    grammar: Grammar | None
    seen: BeforeCall | None
    num: int = 0
    lead: int | None = None


class Constraints:
    """The constraints of one request's answer. `push` is called with every token of the answer except the end token."""

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
        opening: Opening | None = None,
        thinks_first: bool = False,
    ) -> None:
        """Start at the end of the prompt. ends: tokens that end the answer; none where the request ignores them. least: the number of
        tokens that the answer has before one of `ends` is allowed. opening: the tag from which the grammar holds; None where the grammar
        is that of the whole answer. thinks_first: the answer may begin with thinking, and the grammar of the whole answer begins after
        it, unless each of the grammar's texts begins with the opening tag itself."""
        self._thinking, self._words, self._opening, self._call = thinking, words, opening, grammar
        self._ends, self._size, self._least = ends, vocabulary.size, least
        start = thinking.start(prompt) if thinking else ThinkingState("done")
        lead = None
        if grammar and opening is None and start.phase == "waiting":
            if thinks_first and thinking and thinking.may_lead(grammar, prompt):
                lead, grammar = 0, grammar.copy()
            else:  # the grammar forbids that the model opens it, or says itself how it thinks
                start = ThinkingState("done")
        self._state = _State(
            start, START, None if opening else grammar, opening.start() if opening else None, lead=lead
        )
        # an answer whose grammar has not begun is not complete
        ends = frozenset(token for token in ends if token < self._size)
        self._is_whole = grammar is not None and opening is None
        self._all_but_ends = bitsets.all_but(ends, self._size) if self._is_whole or least else None
        self._no_text = bitsets.only(ends | vocabulary.special, self._size) if opening else None
        self._looked: tuple[list[int], list[Bits | None]] | None = (
            None  # the draft last looked along, and what was seen
        )
        self.num_forced = 0  # tokens of a closing tag

    @property
    def num_thinking(self) -> int:
        """Return the number of tokens of thinking so far."""
        return self._state.thinking.num_tokens

    def close_thinking(self, num: int, thinking: Thinking, state: ThinkingState) -> bool:
        """Force the closing tag `num` tokens from here. Returns False where thinking is not open, or where its budget closes it earlier.
        thinking, state: those of the text so far, for a row whose thinking was not followed until now."""
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
        """Return whether the grammar allows no further token: the answer is complete."""
        grammar = self._holds(self._state)
        return grammar is not None and grammar.is_finished

    @property
    def awaits_grammar(self) -> bool:
        """Return whether the answer is in thinking, and the grammar of the whole answer begins after it."""
        return self._is_whole and self._state.lead is None and self._holds(self._state) is None

    @property
    def overdue(self) -> str | None:
        """Return the reason why the row must end, where its grammar took too long and could not end it itself; else None."""
        return None if self._state.grammar is None else self._state.grammar.overdue

    @property
    def watches(self) -> bool:
        """Return whether a tag in the text starts a grammar, so that the allowed tokens depend on the text."""
        return self._opening is not None

    @property
    def is_waiting(self) -> bool:
        """Return whether no token is forbidden until a tag begins or a thinking budget is used up."""
        return self.watches and not self.reaches(0)

    def reaches(self, width: int) -> bool:
        """Return whether a token may be forbidden at one of the next `width` positions, whatever tokens come before it. A tag in those
        tokens is not considered."""
        state = self._state
        if (
            self._words is not None
            or state.grammar is not None
            or state.num < self._least
            or state.lead is not None
        ):
            return True
        return self._thinking is not None and self._thinking.reaches(state.thinking, width)

    def masks(self, draft: Sequence[int]) -> list[Bits | None]:
        """Return the allowed tokens at each position of a draft and after it: len(draft) + 1 sets, None where all are allowed. After a
        drafted token that is forbidden or ends the answer all are allowed, since no token there is accepted."""
        draft = list(draft)
        if self._looked is None or self._looked[0][: len(draft)] != draft:
            self._looked = draft, self._look(draft)[0]
        return self._looked[1][: len(draft) + 1]

    def _look(self, draft: list[int], *, may_cut: bool = False) -> tuple[list[Bits | None], int]:
        """Return the sets of `masks`, and how many tokens of the draft were examined: fewer than all where may_cut is True and the
        grammar takes too long."""
        found: list[Bits | None] = []
        state, grammar = self._state, self._state.grammar
        before = 0 if grammar is None else grammar.num_tokens
        for place, token in enumerate(draft):
            mask = self._mask(state)
            found.append(mask)
            if may_cut and state.grammar is not None and state.grammar.is_costly:
                draft = draft[:place]
                break
            if token in self._ends or (mask is not None and not bitsets.holds(mask, token)):
                break
            after = self._step(state, token)
            if after is None:
                break
            state = after
        else:
            found.append(self._mask(state))
        if grammar is not None:
            grammar.rollback(grammar.num_tokens - before)
        return found + [None] * (len(draft) + 1 - len(found)), len(draft)

    def validate(self, draft: Sequence[int]) -> int:
        """Return how many of these tokens to verify: those before the first forbidden one, as far as the grammar has time to check them."""
        draft = list(draft)
        masks, length = self._look(draft, may_cut=True)
        draft = draft[:length]
        self._looked = draft, masks
        for length, (token, mask) in enumerate(zip(draft, masks, strict=False)):
            if mask is not None and not bitsets.holds(mask, token):
                return length
        return len(draft)

    def forced(self) -> list[int]:
        """Return the next tokens where only one is allowed at each position."""
        closing = self._thinking.forced(self._state.thinking) if self._thinking else []
        grammar = self._holds(self._state)
        return closing if closing or grammar is None else grammar.forced()

    def push(self, token: int) -> bool:
        """Advance by one token of the answer. Returns False where the token is not allowed because no token was."""
        own = self._own_mask(self._state)
        if own is not None and not bitsets.holds(own, token):
            return False
        after = self._step(self._state, token)
        if after is None:
            return False
        self.num_forced += self._state.thinking.phase == "closing"
        self._state, self._looked = after, None
        return True

    def _holds(self, state: _State) -> Grammar | None:
        """Return the grammar that the next token must follow; None where there is none."""
        if state.lead is not None:
            return None
        if state.seen is not None:
            return state.grammar if state.seen.is_open else None
        return state.grammar if state.thinking.phase == "done" else None

    def _own_mask(self, state: _State) -> Bits | None:
        """Return the tokens that forced tokens and bad words allow. While a grammar waits for the end of thinking, no token that ends
        the answer is allowed."""
        forced = self._thinking.forced(state.thinking) if self._thinking else []
        mask = self._words.mask(state.words) if self._words else None
        if forced:  # a word may end in the tag that begins before it
            return _both(mask, bitsets.only(forced[:1], self._size))
        may_end = state.num >= self._least and not (self._is_whole and self._holds(state) is None)
        return mask if may_end else _both(mask, self._all_but_ends)

    def _mask(self, state: _State) -> Bits | None:
        mask = self._own_mask(state)
        grammar = self._holds(state)
        if grammar is not None:
            return _both(mask, grammar.mask())
        if state.lead is not None and self._thinking is not None:
            tag = bitsets.only(self._thinking.opening[state.lead : state.lead + 1], self._size)
            return _both(mask, tag if state.grammar is None else np.bitwise_or(tag, state.grammar.mask()))
        if state.seen is None or state.grammar is None or self._no_text is None:
            return mask
        # a token may complete the tag and say more
        return _both(mask, np.bitwise_or(state.grammar.mask(), self._no_text))

    def _step(self, state: _State, token: int) -> _State | None:
        """Return the state after one more token; None where the grammar forbids it."""
        if state.lead is not None and self._thinking is not None:
            return self._led(self._thinking, state, state.lead, token)
        held = self._holds(state)
        if held is not None and not held.consume(token):
            return None
        thinking = self._thinking.step(state.thinking, token) if self._thinking else state.thinking
        words = self._words.step(state.words, token) if self._words else START
        grammar, seen = state.grammar, state.seen
        if self._opening is not None and seen is not None:
            grammar, seen = self._followed(self._opening, state, seen, thinking, token)
            if seen.is_open:  # what its arguments spell opens no thinking
                thinking = ThinkingState("done")
        return _State(thinking, words, grammar, seen, state.num + 1)

    def _led(self, rules: Thinking, state: _State, lead: int, token: int) -> _State | None:
        """Return the state after one more token of an answer that begins with the opening tag of thinking or with the grammar's text;
        None where the token is of neither."""
        is_tag = token == rules.opening[lead]
        grammar = state.grammar if state.grammar is not None and state.grammar.consume(token) else None
        if grammar is None and not is_tag:
            return None
        thinking, after = rules.step(state.thinking, token), lead + 1 if is_tag else None
        if after == len(rules.opening):
            grammar, after = None if self._call is None else self._call.copy(), None
        elif after is None:
            thinking = ThinkingState("done")
        words = self._words.step(state.words, token) if self._words else START
        return _State(thinking, words, grammar, None, state.num + 1, after)

    def _followed(
        self, opening: Opening, state: _State, seen: BeforeCall, thinking: ThinkingState, token: int
    ) -> tuple[Grammar | None, BeforeCall]:
        """Return the grammar of calls, and the state of the text before a call, after one more token."""
        grammar = state.grammar
        if seen.is_open and grammar is not None:
            is_over = grammar.is_finished and not opening.once
            return (None, BeforeCall(seen.place)) if is_over else (grammar, seen)
        if thinking.phase not in ("waiting", "done") or state.thinking.phase not in ("waiting", "done"):
            return None, opening.start()
        after = opening.step(seen, token)
        if not after.may_open:
            return None, after
        if grammar is None and self._call is not None:
            grammar = self._call.copy()
        if grammar is None or not grammar.consume(token):  # half a character stands before the tag
            return None, after._replace(is_open=False, tail="")
        return grammar, after


def ends_of(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end an answer."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)


def _forbids(thinking: Thinking, params: SamplingParams) -> str | None:
    """Return the name of the parameter that forbids the closing tag of thinking; None where none does."""
    if params.allowed_token_ids and not set(thinking.closing) <= set(params.allowed_token_ids):
        return "allowed_token_ids"
    return "bad_words" if any(word in params.thinking_tags[1] for word in params.bad_words) else None


def _both(one: Bits | None, other: Bits | None) -> Bits | None:
    """Return the tokens that both sets allow; None allows all."""
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
    """A maker of constraints for one model. What depends on the vocabulary alone is made once, when it is first needed. clock: counts
    the time that grammars take in the engine's thread."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self.clock = RoundClock()

    def compile(self, params: SamplingParams, num_rows: int = 1, owner: str = "") -> Compiled:
        """Compile the grammar, bad words and DRY breakers of these parameters once, to be shared by num_rows rows. owner: whose request
        it is; grammars are kept by owner. May be called in any thread, and may take seconds. Raises GrammarError, and ConfigError
        without a tokenizer."""
        if params.wants_logprobs and self._tokenizer is not None:
            self._prepare_vocabulary()
        has_grammar = params.has_grammar
        if not (has_grammar or params.bad_words or params.dry_multiplier):
            return Compiled()
        if self._tokenizer is None:
            raise ConfigError(_NO_TOKENIZER)
        self._prepare_vocabulary()
        words = BadWords(params.bad_words, self.vocabulary) if params.bad_words else None
        grammar = self._compiler.compile(params, owner) if has_grammar else None
        is_whole = not params.lark_at
        if (
            words is not None
            and grammar is not None
            and is_whole
            and not np.any(words.mask(START) & grammar.mask())
        ):
            raise GrammarError("No text is both of this grammar and without the bad words.")
        breaks = self._breaks(params) if params.dry_multiplier else None
        nbytes = (grammar_bytes(params) if has_grammar else 0) + (0 if words is None else words.nbytes)
        return Compiled(words=words, grammar=grammar, breaks=breaks, nbytes=-(-nbytes // num_rows))

    def _breaks(self, params: SamplingParams) -> NDArray[np.bool_]:
        found = [text.encode() for text in params.dry_sequence_breakers]
        return np.array([any(text in token for text in found) for token in self.vocabulary.tokens])

    def constraints_for(
        self, params: SamplingParams, prompt: Sequence[int], compiled: Compiled | None = None
    ) -> Constraints | None:
        """Return the constraints of one row; None where no token can be forbidden. compiled: what `compile` returned for these
        parameters; None: compile here. Raises as `compile` does."""
        watches = params.has_grammar or params.thinking_budget is not None
        if not (watches or params.bad_words or params.min_tokens):
            return None
        if self._tokenizer is None:
            raise ConfigError(_NO_TOKENIZER)
        compiled = compiled or self.compile(params)
        thinking = self._thinking(params, params.thinking_budget) if watches else None
        what = None if thinking is None or params.thinking_budget is None else _forbids(thinking, params)
        if what is not None:
            raise ConfigError(
                f"thinking_budget and {what} contradict each other: they forbid the closing tag of thinking_tags."
            )
        return Constraints(
            thinking=thinking,
            words=compiled.words,
            grammar=None if compiled.grammar is None else compiled.grammar.copy(self.clock),
            opening=Opening(params.lark_at, self.vocabulary, once=params.lark_once)
            if params.lark_at
            else None,
            prompt=prompt,
            vocabulary=self.vocabulary,
            ends=ends_of(params, self.vocabulary.eos_ids),
            least=params.min_tokens,
            thinks_first=params.thinks_first,
        )

    def loops_for(self, params: SamplingParams, prompt: Sequence[int]) -> Loops | None:
        """Return the search for loops in one answer; None where the loop breaker is off, or where only thinking is examined and there
        will be none."""
        if params.loop_breaker == "off" or self._tokenizer is None:
            return None
        opens = self._thinking_tags == params.thinking_tags
        thinking = self._thinking(params, None)
        if thinking is not None and _forbids(thinking, params) is not None:
            thinking = None
        is_free = not ((params.has_grammar and not params.lark_at) or params.ignore_eos or params.min_tokens)
        ends = params.loop_breaker == "all" or (params.loop_breaker is None and is_free)
        loops = Loops(thinking, prompt, opens=opens, ends=ends)
        return loops if loops.is_on else None

    def unconstrained(self) -> Constraints:
        """Return constraints that allow all tokens, for a row whose thinking may be closed later."""
        return Constraints(
            thinking=None, words=None, grammar=None, prompt=(), vocabulary=self.vocabulary, ends=frozenset()
        )

    @cached_property
    def _thinking_tags(self) -> tuple[str, str] | None:
        """Return the tags of thinking in the chat template; None for a model that does not think."""
        template = None if self._tokenizer is None else self._tokenizer.template
        return None if template is None else detect(template.source).thinking

    def _prepare_vocabulary(self) -> None:
        """Build the tables of the vocabulary, in one thread at a time. A large vocabulary takes a good part of a second."""
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
        """Return the bytes of each token by its id; all empty without a tokenizer."""
        return (b"",) * self._size if self._tokenizer is None else self.vocabulary.tokens

    @cached_property
    def vocabulary(self) -> TokenBytes:
        if self._tokenizer is None:
            raise ConfigError("Without a tokenizer tokens have no bytes.")
        return TokenBytes(self._tokenizer, self._size)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.vocabulary)
