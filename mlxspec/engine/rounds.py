"""Runs an engine's rounds one after the other: each is launched when the one before it has been read.

`Pipeline` (pipeline.py) does the same with rounds that overlap. This module deals with rounds, and not with the queue, prompts or the
readers of events.
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
    """The time of a round, in the form that policies learn from.

    plan: the round's drafts and the policies' choices. numbers: of the requests in the round. num_tokens: over all rows. seconds: its
    duration. The launch of this round counts, even where it was earlier, and that of the next round does not. ahead: whether it was
    launched before the round in front of it was read. is_warm: whether nothing was compiled in it.
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
        """Count a round that compiled something in the statistics of its requests. Where one request was alone in the round, record its
        time: in `plain` where it was a plain round launched ahead, else among the request's other rounds, because those take longer."""
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
        """Teach the round's time to the policies."""
        drafts.learn(
            self.plan, self.numbers, self.num_tokens, self.seconds, ahead=self.ahead, is_warm=self.is_warm
        )


class ReadRound(NamedTuple):
    """A round that has been read. events: for the callers. times: None where the device also read prompts during the round, so that its
    time is no measurement."""

    events: list[Event]
    times: TimedRound | None


class Rounds:
    """The rounds of an engine, one after the other. is_on_way: whether a round is launched and the host has not read its results;
    is_open: whether its cache transaction is open. In this class both are always False between two calls of `advance`."""

    is_on_way = is_open = False

    def __init__(self, drafts: Drafts, stats: EngineStats, *, widest: int | None = None) -> None:
        """Start with no round. widest: the most tokens of a round."""
        self._drafts, self._stats, self._widest = drafts, stats, widest

    def advance(
        self, rows: Sequence[Request], model: Model, cache: ModelCache, *, may_follow: bool
    ) -> ReadRound:
        """Launch one round, wait for it, accept, commit, and return its events and time. may_follow: whether these rows will decode in
        the next round, too."""
        started = time.perf_counter()
        current = launch(rows, model, cache, self._drafts, self._stats, widest=self._widest)
        self._drafts.take_up(current.plan)
        self._stats.num_synchronised += 1
        events = read(current, cache, self._drafts, self._stats)
        return ReadRound(events, TimedRound.of(current, time.perf_counter() - started))

    def share(self) -> None:
        """Note that the device reads prompts now, so that the time of a launched round is no measurement."""

    def drop(self, cache: ModelCache) -> None:
        """Abort a launched round whose cache transaction is open, so that the rows are as though it had not been launched."""

    def end(self) -> None:
        """Forget a launched round, because no rows are left or because the device's state is unknown after an error."""
