"""The thinking budget: counts tokens between the thinking tags and forces the closing tag at the budget, or where thinking loops.

A state is a value, so the effect of a draft can be computed and dropped. Only the first stretch of thinking is counted; nothing is forced
after it. A character that the budget cuts stays incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mlxspec.errors import ConfigError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.sampling.loops import EVERY, LEAST, WINDOW, period_of


class ThinkingState(NamedTuple):
    """phase; tokens thought; the bytes that may begin a tag; how much of the closing tag has been forced. said: where loops are looked for,
    the last token and what was said before it. period: of the loop for which thinking was closed."""

    phase: Literal["waiting", "open", "closing", "done"]
    num_tokens: int = 0
    tail: bytes = b""
    num_closed: int = 0
    said: tuple[int, Any] | None = None
    period: int | None = None


class Thinking:
    """The rules of one request. budget None: only watch. breaks_loops: thinking that loops is closed."""

    def __init__(
        self, tags: tuple[str, str], budget: int | None, vocabulary: TokenBytes, *, breaks_loops: bool = False
    ) -> None:
        """Raises ConfigError where the closing tag cannot be written with this vocabulary."""
        self._tokens = vocabulary.tokens
        self._open, self._close = (tag.encode() for tag in tags)
        self._budget, self._breaks_loops = budget, breaks_loops
        self.closing = vocabulary.encode(tags[1])
        if b"".join(self._tokens[t] for t in self.closing) != self._close:
            raise ConfigError(f"This model's vocabulary cannot write the closing tag {tags[1]!r}.")

    def start(self, prompt: Sequence[int]) -> ThinkingState:
        """Behind a prompt. It has opened thinking if nothing but white space stands behind its last opening tag."""
        data = b"".join(self._tokens[t] for t in prompt[-64:])
        _, tag, after = data.rpartition(self._open)
        return self._opened(b"") if tag and not after.strip() else ThinkingState("waiting")

    def step(self, state: ThinkingState, token: int) -> ThinkingState:
        """Behind one more token."""
        if state.phase == "done":
            return state
        if state.phase == "closing":
            done = state.num_closed + 1 == len(self.closing)
            return state._replace(phase="done" if done else "closing", num_closed=state.num_closed + 1)
        tag = self._open if state.phase == "waiting" else self._close
        data = state.tail + self._tokens[token]
        place = data.find(tag)
        tail = data[-(len(tag) - 1) :] if len(tag) > 1 else b""
        if state.phase == "waiting":
            return state._replace(tail=tail) if place < 0 else self._opened(data[place + len(tag) :])
        if place >= 0:
            return state._replace(phase="done")
        num = state.num_tokens + 1
        said = (token, state.said) if self._breaks_loops else None
        period = _period(said) if said is not None and num % EVERY == 0 and num >= LEAST else None
        phase: Literal["closing", "open"] = "closing" if num == self._budget or period is not None else "open"
        return ThinkingState(phase, num, tail, 0, None if period is not None else said, period)

    def forced(self, state: ThinkingState) -> list[int]:
        """Tokens that must come now."""
        return self.closing[state.num_closed :] if state.phase == "closing" else []

    def reaches(self, state: ThinkingState, width: int) -> bool:
        """Whether a token may be forced at one of the next `width` places."""
        if state.phase in ("closing", "done"):
            return state.phase == "closing"
        num = state.num_tokens
        # a waiting row may open with its next token
        is_near = self._budget is not None and self._budget - num < width
        return is_near or (self._breaks_loops and max(LEAST, (num // EVERY + 1) * EVERY) - num < width)

    def _opened(self, tail: bytes) -> ThinkingState:
        if self._close in tail:
            return ThinkingState("done")
        return ThinkingState("closing" if self._budget == 0 else "open", 0, tail)


def _period(said: tuple[int, Any] | None) -> int | None:
    """With which period what was said loops."""
    tokens: list[int] = []
    while said is not None and len(tokens) < WINDOW:
        token, said = said
        tokens.append(token)
    return period_of(tokens[::-1])
