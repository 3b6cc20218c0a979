"""Launches a round before the one in front of it has been read, so that the host works while the device computes.

Its rows' tokens are not in their histories. A plain one's are in the cache; one with drafts is an open transaction (see round.py), so
before rows join or leave it has to be read or dropped. Knows rounds and when they may overlap; knows no queue, no prompts and no events'
audience.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxspec.cache.model_cache import ModelCache
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.policy import RoundPlan
from mlxspec.engine.request import Request
from mlxspec.engine.round import Round, launch, launch_behind, read
from mlxspec.engine.stats import EngineStats, PlainRounds
from mlxspec.events import Event
from mlxspec.models.base import Model

# A device that begins on a round while the one before still runs cannot write keys and values in place, as that one reads them, and copies
# all of them. Then a round is built ahead and begun on when the one before is through. That costs the time in which MLX hands it over, a
# millisecond or so: about what a GPU takes to copy so many bytes
_COPIED_AT_MOST = 64 << 20
# MLX waits while ten command buffers of about 50 MB each are on their way: when it comes to a layer of the next round of so many bytes of
# weights, the round before is through with that layer
_NO_COPIES = 20 * (50 << 20)


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """The time that a round took, as policies learn it.

    plan: who drafted; numbers: of the requests in it. seconds: launching it included, whenever that was, and launching the next one not.
    ahead: it was launched before its turn. is_warm: nothing was compiled in it.
    """

    plan: RoundPlan
    numbers: tuple[int, ...]
    num_tokens: int
    seconds: float
    ahead: bool
    is_warm: bool

    def count(self, rows: Sequence[Request], plain: PlainRounds) -> None:
        """Count a round that compiled for its requests, and one of plain decoding, unless it was not launched ahead and so took longer."""
        own = [request for request in rows if request.number in self.numbers]
        if not self.is_warm:
            for request in own:
                request.stats.num_compiling_rounds += 1
        elif self.ahead and self.num_tokens == len(self.numbers) == len(own) == 1:
            plain.add(len(own[0].history), self.seconds)

    def teach(self, drafts: Drafts) -> None:
        """Tell the policies."""
        drafts.learn(
            self.plan, self.numbers, self.num_tokens, self.seconds, ahead=self.ahead, is_warm=self.is_warm
        )


class ReadRound(NamedTuple):
    """A round that has been read. times: None where the device read prompts while the round was on its way, so that they mean nothing."""

    events: list[Event]
    times: TimedRound | None


class Pipeline:
    """At most one round. next: it, None where nothing is on its way."""

    def __init__(
        self,
        drafts: Drafts,
        stats: EngineStats,
        *,
        widest: int | None,
        overlaps: bool,
        num_bytes: int = 0,
    ) -> None:
        """widest: at most so many tokens a round. overlaps: whether a round with drafts may be launched behind another. num_bytes: of
        weights that a round reads."""
        self.next: Round | None = None
        self._copies = num_bytes < _NO_COPIES
        self._drafts, self._stats, self._widest, self._overlaps = drafts, stats, widest, overlaps
        self._launching = 0.0  # seconds in which `next` was launched
        self._is_shared = False  # the device has read prompts while `next` was on its way

    @property
    def is_open(self) -> bool:
        """Whether a round with drafts is on its way."""
        return self.next is not None and self.next.is_open

    def advance(
        self, rows: Sequence[Request], model: Model, cache: ModelCache, *, may_follow: bool
    ) -> ReadRound:
        """Read the round that is on its way, or one launched now; the next one is put on its way before, where that may be."""
        stats, drafts, ahead = self._stats, self._drafts, self.next is not None
        started = time.perf_counter() - (self._launching if ahead else 0.0)
        current = self.next or launch(rows, model, cache, drafts, stats, widest=self._widest)
        self.next, holds = None, False
        drafts.take_up(current.plan)
        is_shared, self._is_shared = self._is_shared, False
        launched = time.perf_counter()
        if may_follow and (self._overlaps or not current.is_open):
            holds = self._copies and cache.buffer_bytes > _COPIED_AT_MOST
            self.next = launch_behind(
                current, rows, model, cache, drafts, stats, may_draft=self._overlaps, holds=holds
            )
        self._launching = 0.0 if self.next is None else time.perf_counter() - launched
        events, has_changed = read(current, cache, drafts, stats, behind=self.next, holds=holds)
        if has_changed:
            self.drop(cache)
        seconds = time.perf_counter() - started - self._launching
        if is_shared:
            return ReadRound(events, None)
        times = TimedRound(
            plan=current.plan,
            numbers=tuple(r.number for r in current.requests),
            num_tokens=current.rows.num_tokens,
            seconds=seconds,
            ahead=ahead,
            is_warm=current.is_warm,
        )
        return ReadRound(events, times)

    def share(self) -> None:
        """The device reads prompts now. What the round on its way takes says nothing then."""
        self._is_shared = self.next is not None

    def drop(self, cache: ModelCache) -> None:
        """If it is one with drafts, leave rows as though it had not been launched."""
        if self.is_open:
            cache.abort()
            self._stats.num_unread += 1
            self.end()

    def end(self) -> None:
        """Nothing is on its way any more: no rows are left, nobody reads what is, or nothing is known of what the device did."""
        self.next, self._is_shared = None, False
