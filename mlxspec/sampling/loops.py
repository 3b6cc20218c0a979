"""Notices a text that loops, by its last tokens alone: the same tokens give the same verdict, whoever drafted them.

A text loops where it brings nothing new: its last LEAST tokens at least, and its last four periods at least, repeat one period of up to
LONGEST tokens without a single other token. So an enumeration that counts, alternates or grows is no loop, however alike its items are.

An answer is looked at every EVERY tokens. One that loops ends there. Thinking that loops there is closed DELAY tokens later: no round that
is on its way by then reaches so far, so until a loop is found nothing is forbidden, and rows run ahead as without looking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlxspec.sampling.thinking import Thinking, ThinkingState

LONGEST = 400  # tokens of a period
LEAST = 200  # tokens that hold nothing but the period
EVERY = 64  # tokens between two looks
DELAY = 128  # tokens from a look to the closing tag; drafts are no longer
_PERIODS = 4
WINDOW = _PERIODS * LONGEST  # tokens that a verdict depends on
_NEAR = 3  # last tokens that must be those one period before: the rest is not looked at


def period_of(tokens: Sequence[int]) -> int | None:
    """Return the shortest period in tokens with which the end of `tokens` repeats itself; None where it does not."""
    text = np.asarray(tokens[-WINDOW:], np.int64)
    if len(text) < LEAST:
        return None
    most = min(LONGEST, len(text) // _PERIODS)
    ends = np.arange(len(text) - _NEAR, len(text))
    agree = (text[ends] == text[ends - np.arange(1, most + 1)[:, None]]).all(axis=1)
    for period in (np.flatnonzero(agree) + 1).tolist():
        last = text[-max(LEAST, _PERIODS * period) :]
        if np.array_equal(last[period:], last[:-period]):
            return period
    return None


class Loop(NamedTuple):
    """A loop at the end of a text. is_thought: whether the loop is in thinking; period: number of tokens in the part that repeats."""

    is_thought: bool
    period: int


class Loops:
    """The search for loops in one answer. Thinking is followed only where the text repeats itself.

    thinking: the rules of thinking without a budget; None where the model cannot think. state: the state of thinking as far as it was
    followed. is_on: whether anything is left to search.
    """

    def __init__(self, thinking: Thinking | None, prompt: Sequence[int], *, opens: bool, ends: bool) -> None:
        """Start at the end of the prompt. opens: whether the answer may begin with the opening tag of thinking. ends: examine text
        outside thinking too."""
        self.thinking, self._ends = thinking, ends
        self.state = ThinkingState("done") if thinking is None else thinking.start(prompt)
        if self.state.phase == "waiting" and not opens:
            self.state = ThinkingState("done")
        # tokens of the answer: those followed, and those before the stretch that is looked at
        self._num_seen = self._begin = 0

    @property
    def is_on(self) -> bool:
        return self._ends or self.state.phase != "done"

    def look(self, text: Sequence[int], num_prompt: int) -> Loop | None:
        """Return the loop at the end of a text of num_prompt tokens and an answer; None where there is none. Only the answer's tokens
        are examined."""
        if period_of(text[max(num_prompt, len(text) - WINDOW) :]) is None:
            return None
        if self.thinking is not None:
            for place in range(num_prompt + self._num_seen, len(text)):
                self._follow(self.thinking, text[place])
        period = period_of(text[max(num_prompt + self._begin, len(text) - WINDOW) :])
        is_thought = self.state.phase in ("open", "closing")
        return None if period is None or not (is_thought or self._ends) else Loop(is_thought, period)

    def _follow(self, thinking: Thinking, token: int) -> None:
        """Advance the state of thinking by the answer's next token."""
        before, self._num_seen = self.state.phase, self._num_seen + 1
        self.state = thinking.step(self.state, token)
        if self.state.phase == "waiting" and not thinking.begins(self.state):
            self.state = ThinkingState("done")
        elif self.state.phase != before:
            self._begin = self._num_seen
