"""N-gram drafting token by token: the hash of a long window of tokens gives the next token, and the window moves on by one.

After llama.cpp's `common/ngram-mod` (#19164, #22168). Long windows (24 tokens) are cheap because a window is one
number, updated in O(1) as it slides; keys are neither stored nor compared. Since each token is looked up for itself,
a draft can pass from one earlier place to another. Knows the row's own text only; knows no probabilities. Kept: last
writer wins, five poor drafts in a row. Different, and why:
- One pool a row, growing with its text. llama.cpp's pool of 4 Mi entries serves all requests, so text of one leaks
  into drafts for another; and it is wiped when a quarter full, taking with it the prompt just read. Here the full 64
  bits of the hash are the key, so entries do not collide in practice, and nothing needs wiping.
- Every token is learned as it comes (there up to 32 tokens late), and hashes roll (there each is computed anew).
- Poor drafts: a fresh pool of the same text would be the same pool, so the reset there (which rids it of foreign
  text) is here a rest: no drafts for 64 tokens, twice as many each time, until a draft does well again. A draft is
  poor when under a quarter of it stood, of what was really proposed (there the length before it is cut to the
  budget).
- There is no n_min: a run of look-ups in a pool that holds the row's whole text never ends (the window a step leads to
  stands in the text too, and if it is the last one, that is where the run began), so every run is long enough. Whether
  a long verify pays, as for mixtures of experts it may not, is for whoever knows costs to say.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from mlxspec.drafters.base import NO_DRAFT, Draft
from mlxspec.drafters.ngram_rows import Follower, NgramDrafter, NgramRow

POOR_SHARE = 0.25  # a draft of which less stood is poor
MAX_POOR = 5  # so many in a row lead to a rest
REST = 64  # tokens of the first rest
MAX_DOUBLINGS = 6

_FACTOR = 0x5851F42D4C957F2D  # Knuth's MMIX multiplier
_MASK = (1 << 64) - 1


class Quality(NamedTuple):
    """How drafts have done. num_poor: in a row; num_rests: since a good one; resting_until: a history length."""

    num_poor: int = 0
    num_rests: int = 0
    resting_until: int = 0

    def after(self, accepted: int, proposed: int, length: int) -> Quality:
        """With one more verdict, known when the history has `length` tokens."""
        if accepted >= POOR_SHARE * proposed:
            return Quality()
        if self.num_poor + 1 < MAX_POOR:
            return self._replace(num_poor=self.num_poor + 1)
        rest = REST << min(self.num_rests, MAX_DOUBLINGS)
        return Quality(0, self.num_rests + 1, length + rest)


class ModRow(NgramRow):
    """One row's pool: hash of n tokens -> the token that followed last.

    The hash of a window is the sum of token * factor^(distance from its end), modulo 2^64.
    """

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m
        self.history: list[int] = []
        self.quality = Quality()
        self._drop_factor = pow(_FACTOR, n, 1 << 64)
        self._hash = 0  # of the last n tokens, or of all while there are fewer
        self._pool: dict[int, int] = {}
        self._follower: Follower[int] = Follower()

    def extend(self, tokens: Sequence[int]) -> None:
        n, history, pool = self.n, self.history, self._pool
        for token in tokens:
            if self._follower.is_open:
                self._judge(token)
            size = len(history)
            dropped = 0
            if size >= n:
                pool[self._hash] = token
                dropped = history[size - n]
            history.append(token)
            self._hash = (self._hash * _FACTOR + token - dropped * self._drop_factor) & _MASK

    def draft(self, limit: int) -> Draft:
        n, length = self.n, min(limit, self.m)
        if len(self.history) < max(n, self.quality.resting_until):
            return NO_DRAFT
        window, key = self.history[-n:], self._hash
        for i in range(length):
            token = self._pool.get(key)
            if token is None:
                break
            window.append(token)
            key = (key * _FACTOR + token - window[i] * self._drop_factor) & _MASK
        tokens = window[n:]
        if not tokens:
            return NO_DRAFT
        self._follower.follow(tokens, 0)
        return Draft(len(tokens), tokens)

    @property
    def nbytes(self) -> int:
        key = sys.getsizeof(_MASK)
        return sys.getsizeof(self.history) + sys.getsizeof(self._pool) + key * len(self._pool)

    def _judge(self, token: int) -> None:
        verdict = self._follower.hear(token)
        if verdict is not None:
            length = len(self.history) + 1
            self.quality = self.quality.after(verdict.accepted, verdict.proposed, length)


class NgramMod(NgramDrafter):
    """ngram-mod. n: tokens that must repeat; m: tokens drafted at most."""

    name = "ngram-mod"

    def __init__(self, n: int, m: int) -> None:
        super().__init__(lambda: ModRow(n, m))
