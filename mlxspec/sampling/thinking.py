"""The thinking budget: counts tokens between the thinking tags and forces the closing tag at the budget.

A state is a value, so the effect of a draft can be computed and dropped. Only the first stretch of thinking is counted; nothing is forced
after it. A character that the budget cuts stays incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from mlxspec.errors import ConfigError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.sampling.grammar import Grammar


class ThinkingState(NamedTuple):
    """The state of thinking in an answer: the phase, the number of thinking tokens, the last bytes that may begin a tag, and how much of
    the closing tag has been forced."""

    phase: Literal["waiting", "open", "closing", "done"]
    num_tokens: int = 0
    tail: bytes = b""
    num_closed: int = 0


class Thinking:
    """The rules of thinking for one request. budget: the most tokens of thinking; None only follows the tags."""

    def __init__(self, tags: tuple[str, str], budget: int | None, vocabulary: TokenBytes) -> None:
        """Encode the tags. Raises ConfigError where the closing tag cannot be written with this vocabulary."""
        self._spelled = vocabulary.spelled
        self._open, self._close = (tag.encode() for tag in tags)
        self.budget = budget
        self.closing = vocabulary.encode(tags[1])
        opening = vocabulary.encode(tags[0])
        self.opening = opening if b"".join(map(self._spelled, opening)) == self._open else []
        if b"".join(map(self._spelled, self.closing)) != self._close:
            raise ConfigError(f"This model's vocabulary cannot write the closing tag {tags[1]!r}.")

    def start(self, prompt: Sequence[int]) -> ThinkingState:
        """Return the state after a prompt. The prompt has opened thinking if only white space follows its last opening tag."""
        data = b"".join(map(self._spelled, prompt[-64:]))
        _, tag, after = data.rpartition(self._open)
        return self._opened(b"") if tag and not after.strip() else ThinkingState("waiting")

    def is_closed(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the closing tag."""
        return b"".join(map(self._spelled, prompt[-64:])).rstrip().endswith(self._close)

    def may_lead(self, grammar: Grammar, prompt: Sequence[int]) -> bool:
        """Return whether an answer may think before its grammar begins: the tag can be written, the prompt has not just closed thinking,
        and the grammar's own texts do not begin with the tag."""
        return bool(self.opening) and not self.is_closed(prompt) and not self.must_open(grammar)

    def must_open(self, grammar: Grammar) -> bool:
        """Return whether each text of a grammar begins with the opening tag. The grammar is unchanged."""
        grammar, left = grammar.copy(), self._open
        for token in self.opening:
            allowed = np.flatnonzero(np.unpackbits(grammar.mask().view(np.uint8), bitorder="little"))
            texts = (self._spelled(int(other)) for other in allowed)
            if not all(left.startswith(text) or text.startswith(left) for text in texts):
                return False
            if not grammar.consume(token):
                return False
            left = left[len(self._spelled(token)) :]
        return True

    def step(self, state: ThinkingState, token: int) -> ThinkingState:
        """Return the state after one more token."""
        if state.phase == "done":
            return state
        if state.phase == "closing":
            done = state.num_closed + 1 == len(self.closing)
            return state._replace(phase="done" if done else "closing", num_closed=state.num_closed + 1)
        tag = self._open if state.phase == "waiting" else self._close
        data = state.tail + self._spelled(token)
        place = data.find(tag)
        tail = data[-(len(tag) - 1) :] if len(tag) > 1 else b""
        if state.phase == "waiting":
            return state._replace(tail=tail) if place < 0 else self._opened(data[place + len(tag) :])
        if place >= 0:
            return state._replace(phase="done")
        num = state.num_tokens + 1
        return ThinkingState("closing" if num == self.budget else "open", num, tail)

    def forced(self, state: ThinkingState) -> list[int]:
        """Return the tokens that must come next."""
        return self.closing[state.num_closed :] if state.phase == "closing" else []

    def reaches(self, state: ThinkingState, width: int) -> bool:
        """Return whether a token may be forced at one of the next `width` positions."""
        if state.phase in ("closing", "done"):
            return state.phase == "closing"
        # a waiting row may open with its next token
        return self.budget is not None and self.budget - state.num_tokens < width

    def begins(self, state: ThinkingState) -> bool:
        """Return whether the answer so far, without leading white space, may be the beginning of the opening tag. state: a state of
        phase "waiting". It holds only the answer's last bytes, so the result is valid only if it was True after each earlier token."""
        return self._open.startswith(state.tail.lstrip())

    def _opened(self, tail: bytes) -> ThinkingState:
        if self._close in tail:
            return ThinkingState("done")
        return ThinkingState("closing" if self.budget == 0 else "open", 0, tail)
