"""Keeps the hidden states that a row's tokens were sampled from until the prefix store has them. A drafter that missed the text catches up
from them.

Kept only for rows whose own drafters may leave nothing behind. Knows arrays and lengths; knows no rows and no tree.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from mlxspec.config import SpecConfig
from mlxspec.drafters.base import Drafter

_JOINED = 64  # pieces that become one array: each holds on to the hiddens of its whole round


class Hiddens:
    """The hiddens of the tokens from `start` on; `end` is behind the newest."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self._pieces: list[mx.array] = []  # joined ones, and behind them the newest
        self._num_joined = 0

    def add(self, hidden: mx.array) -> None:
        """hidden (n, H), of the next n tokens."""
        self._pieces.append(hidden)
        self.end += len(hidden)
        if len(self._pieces) - self._num_joined >= _JOINED:
            # only the newest: joining all of them would copy the whole text's hiddens again and again
            newest = mx.concatenate(self._pieces[self._num_joined :])
            self._pieces = [*self._pieces[: self._num_joined], newest]
            self._num_joined = len(self._pieces)
            mx.async_eval(newest)

    def until(self, end: int) -> mx.array | None:
        """The hiddens of tokens `start` to `end`; None where there are none, or not so many."""
        if not self.start < end <= self.end:
            return None
        return self._join()[: end - self.start]

    def drop(self, end: int) -> None:
        """Lets go of the hiddens of the first `end` tokens."""
        num = min(end, self.end) - self.start
        if num > 0:
            left = self._join()[num:]
            self._pieces = [mx.concatenate([left, left[:0]])] if len(left) else []
            self._num_joined = len(self._pieces)
            self.start += num
            mx.async_eval(self._pieces)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._pieces)

    def _join(self) -> mx.array:
        self._pieces, self._num_joined = [mx.concatenate(self._pieces)], 1
        return self._pieces[0]


def shows_layers(drafters: Iterable[Drafter], spec: SpecConfig, *, are_kept: bool) -> bool:
    """Whether forwards over a row drafted by `spec` give residual streams of layers: where it uses a drafter that needs them, or hiddens
    are kept for later rows. The answer holds from a row's first token to its last, so that all its hiddens have one width."""
    return any(d.needs.layers and (are_kept or d.name in spec.drafters) for d in drafters)


def missing(drafters: Iterable[Drafter], spec: SpecConfig) -> bool:
    """Whether a row drafted by `spec` may leave a later one without what one of the engine's drafters needs: where it does not use that
    drafter, or the controller may leave it asleep."""
    return any(
        d.needs.every_hidden and (d.name not in spec.drafters or spec.policy == "auto") for d in drafters
    )
