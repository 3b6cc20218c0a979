"""Runs an engine's rounds one after the other: each is launched when the one before it has been read.

`Pipeline` (pipeline.py) does the same with rounds that overlap. Knows rounds; knows no queue, no prompts and no events' audience.
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
from mlxspec.engine.round import Round, launch, read
from mlxspec.engine.stats import EngineStats, PlainRounds
from mlxspec.events import Event
from mlxspec.models.base import Model


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

    @classmethod
    def of(cls, round_: Round, seconds: float, *, ahead: bool = False) -> TimedRound:
        return cls(
            plan=round_.plan,
            numbers=tuple(r.number for r in round_.requests),
            num_tokens=round_.rows.num_tokens,
            seconds=seconds,
            ahead=ahead,
            is_warm=round_.is_warm,
        )

    def count(self, rows: Sequence[Request], plain: PlainRounds) -> None:
        """Count a round that compiled for its requests, and the time of one that a request had alone: as plain decoding's where it was
        launched ahead, since others take longer."""
        own = [request for request in rows if request.number in self.numbers]
        if not self.is_warm:
            for request in own:
                request.stats.num_compiling_rounds += 1
        elif len(self.numbers) == len(own) == 1:
            ended, (request,) = time.perf_counter(), own
            if self.ahead and self.num_tokens == 1:
                request.stats.num_plain_rounds += 1
                plain.add(ended, len(request.history), self.seconds)
            else:
                request.stats.other_rounds.append((ended, self.seconds))

    def teach(self, drafts: Drafts) -> None:
        """Tell the policies."""
        drafts.learn(
            self.plan, self.numbers, self.num_tokens, self.seconds, ahead=self.ahead, is_warm=self.is_warm
        )


class ReadRound(NamedTuple):
    """A round that has been read. times: None where the device read prompts while the round was on its way, so that they mean nothing."""

    events: list[Event]
    times: TimedRound | None


class Rounds:
    """The rounds of one engine. is_on_way: a round has been launched and not read; is_open: its cache transaction is open. Here neither
    is ever the case between two calls of `advance`."""

    is_on_way = is_open = False

    def __init__(self, drafts: Drafts, stats: EngineStats, *, widest: int | None = None) -> None:
        """Start with no round. widest: the most tokens of a round."""
        self._drafts, self._stats, self._widest = drafts, stats, widest

    def advance(
        self, rows: Sequence[Request], model: Model, cache: ModelCache, *, may_follow: bool
    ) -> ReadRound:
        """Read one round. may_follow: whether these rows are those of the next round too, as far as is known."""
        started = time.perf_counter()
        current = launch(rows, model, cache, self._drafts, self._stats, widest=self._widest)
        self._drafts.take_up(current.plan)
        self._stats.num_synchronised += 1
        events = read(current, cache, self._drafts, self._stats)
        return ReadRound(events, TimedRound.of(current, time.perf_counter() - started))

    def share(self) -> None:
        """Note that the device reads prompts now, so that the time of a round on its way means nothing."""

    def drop(self, cache: ModelCache) -> None:
        """Leave rows as though the round on its way had not been launched, if that is open."""

    def end(self) -> None:
        """Forget the round on its way: no rows are left, or nothing is known of what the device did."""
