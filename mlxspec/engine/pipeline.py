"""Launches a round before the one in front of it has been read, so that the host works while the device computes. Reading a round means to
wait for its results and to copy them to the host.

Such a round continues from tokens that are only on the device: a plain round after a plain round, or any round whose drafts the host need
not see. Invariants of the second kind:
    the number of accepted tokens is an array wherever it is used (newest token, ends of keys and values, replay counts, noise's positions);
    shapes do not depend on it, and the host's lengths are upper bounds until the first round has been read;
    reading makes lengths exact again, so at most one commit is unread, and none between two steps of the engine;
    the second round is an open transaction until it is read. If a row leaves before, it is aborted, which leaves everything as though it
    had not been launched: drafters draft for it on forks.
The tokens of an unread round are not in its rows' histories. Before rows join or leave, a launched round with drafts has to be read or
dropped.

Only `Engine` uses this module; with `Rounds` in the place of `Pipeline` the texts are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.unread import UnreadCommit
from mlxspec.config import MAX_DRAFT
from mlxspec.drafters.base import Unread
from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.request import Request
from mlxspec.engine.round import PLAIN, Round, accept, commit, flatten, launch, verify, wait
from mlxspec.engine.rounds import ReadRound, Rounds, TimedRound
from mlxspec.engine.stats import EngineStats
from mlxspec.models.base import Model
from mlxspec.platform import device
from mlxspec.sampling.round import Ahead

# A device that begins on a round while the one before still runs cannot write keys and values in place, as that one reads them, and copies
# all of them. Then a round is built ahead and begun on when the one before is through. That costs the time in which MLX hands it over, a
# millisecond or so: about what a GPU takes to copy this number of bytes
_COPIED_AT_MOST = 64 << 20
# MLX waits while ten command buffers of about 50 MB each are on their way. With this number of bytes of weights, the round before is
# through with a layer when MLX arrives at that layer of the next round
_NO_COPIES = 20 * (50 << 20)


class Pipeline(Rounds):
    """The rounds of an engine, of which the next one may be launched before the host has read the current one's results. next: the
    launched round whose results the host has not read, or None. overlaps: whether a round with drafts may be launched before the one in
    front of it is read."""

    def __init__(
        self,
        drafts: Drafts,
        stats: EngineStats,
        *,
        widest: int | None,
        overlaps: bool,
        num_bytes: int = 0,
    ) -> None:
        """Start with no round. widest: the most tokens of a round. overlaps: as in the class. num_bytes: of weights that rounds read."""
        super().__init__(drafts, stats, widest=widest)
        self.next: Round | None = None
        self._commit: UnreadCommit | None = None  # of the round that is being read, on which `next` goes on
        self._copies, self.overlaps = num_bytes < _NO_COPIES, overlaps
        self._launching = 0.0  # seconds in which `next` was launched
        self._is_shared = False  # the device has read prompts while `next` was on its way

    @property
    def is_on_way(self) -> bool:  # type: ignore[override]
        """Return whether a round is launched and the host has not read its results."""
        return self.next is not None

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Return whether a round with drafts is launched and the host has not read its results."""
        return self.next is not None and self.next.is_open

    def advance(
        self, rows: Sequence[Request], model: Model, cache: ModelCache, *, may_follow: bool
    ) -> ReadRound:
        """Wait for the launched round, or launch one now and wait for it; accept, commit, and return its events and time. Where
        possible, the next round is launched before the waiting. may_follow: whether these rows will decode in the next round, too."""
        stats, drafts, ahead = self._stats, self._drafts, self.next is not None
        started = time.perf_counter() - (self._launching if ahead else 0.0)
        current = self.next or launch(rows, model, cache, drafts, stats, widest=self._widest)
        self.next, self._commit, holds = None, None, False
        drafts.take_up(current.plan)
        is_shared, self._is_shared = self._is_shared, False
        launched = time.perf_counter()
        if may_follow and (self.overlaps or not current.is_open):
            holds = self._copies and _buffer_bytes(cache) > _COPIED_AT_MOST
            self.next = self._launch_behind(current, rows, model, cache, holds=holds)
        self._launching = 0.0 if self.next is None else time.perf_counter() - launched
        stats.num_synchronised += self.next is None
        wait(current, cache, stats)
        if self.next is not None and holds:
            mx.async_eval(self.next.arrays)
        found = accept(current, drafts, stats)
        if self._commit is None:
            commit(current, cache, found.counts)
        else:
            self._commit.settle([1 + num for num in found.counts])
        if found.has_changed:
            self.drop(cache)
        seconds = time.perf_counter() - started - self._launching
        return ReadRound(found.events, None if is_shared else TimedRound.of(current, seconds, ahead=ahead))

    def share(self) -> None:
        self._is_shared = self.next is not None

    def drop(self, cache: ModelCache) -> None:
        if self.is_open:
            cache.abort()
            self._stats.num_unread += 1
            self.end()

    def end(self) -> None:
        self.next, self._is_shared = None, False

    def _launch_behind(
        self, last: Round, rows: Sequence[Request], model: Model, cache: ModelCache, *, holds: bool
    ) -> Round | None:
        """Launch a round that continues from the tokens of the unread round `last`, and return it; None where the host must read those
        tokens first. A row whose answer turns out to have ended gets tokens that are discarded; rows do not affect each other. holds:
        build the round now, and let the device begin on it only after `last`."""
        if holds:
            with device.hold():
                return self._launch_behind(last, rows, model, cache, holds=False)
        # which tokens are allowed there must not depend on a token that is unread
        if any(not r.sampler.is_plain or r.sampler.needs_tokens(1 + last.rows.max_width) for r in rows):
            return None
        started = time.perf_counter()
        if last.is_open:
            return self._drafted_behind(last, rows, model, cache)
        places = {r.number: i for i, r in enumerate(last.requests)}
        if any(r.number not in places for r in rows) or all(r.room == 0 for r in rows):
            return None
        if any(len(r.history) + 1 >= r.max_context for r in rows):
            return None  # the row must not be run past its context
        rooms = {r.number: r.room for r in rows if r.spec.drafters}
        rests = not rooms or self._drafts.rests(rooms)
        drafted = time.perf_counter()
        self._stats.draft_seconds += drafted - started
        if not rests:  # a drafter may draft
            return self._drafted_behind(last, rows, model, cache) if self.overlaps else None
        tokens = last.sampled.tokens
        if len(rows) < len(last.requests):
            tokens = tokens[mx.array([places[r.number] for r in rows])]
        launched = verify(rows, PLAIN, tokens, model, cache, self._drafts, ahead=1)
        self._stats.verify_seconds += time.perf_counter() - drafted
        return launched

    def _drafted_behind(
        self, last: Round, rows: Sequence[Request], model: Model, cache: ModelCache
    ) -> Round | None:
        """Draft from the accepted tokens of the unread round `last`, launch the verify of these drafts, and return that round; None
        where there is no draft."""
        started, width = time.perf_counter(), last.rows.max_width
        rooms = {r.number: r.room - width for r in rows}
        if cache.needs_lengths or min(rooms.values()) < 1 or last.requests != tuple(rows):
            return None
        unread = unread_of(last)
        drafted_for = [i for i, r in enumerate(rows) if r.spec.drafters]
        rooms = {rows[i].number: min(rooms[rows[i].number], MAX_DRAFT) for i in drafted_for}
        plan = self._drafts.propose(rooms, unread.select(drafted_for))
        drafted = time.perf_counter()
        self._stats.draft_seconds += drafted - started
        if plan is None or not any(d.width for d in plan.drafts.values()):
            return None
        if last.is_open:
            self._commit = UnreadCommit(cache, unread.num_committed)
        tokens = flatten(unread.newest, [plan.draft(r.number) for r in rows])
        device.start(tokens)
        ahead = Ahead(unread.num_committed, unread.width)
        launched = verify(rows, plan, tokens, model, cache, self._drafts, ahead=ahead)
        self._stats.verify_seconds += time.perf_counter() - drafted
        return launched


def unread_of(round_: Round) -> Unread:
    """Return the tokens that the rows of an unread round commit: accepted drafted tokens and the round's own token. A row that is
    narrower than the widest one repeats its last place, and the repeated places are never accepted."""
    rows, width = round_.rows, round_.rows.max_width
    shape, given, chosen, hidden = (rows.num_rows, width), round_.tokens, round_.sampled.tokens, round_.hidden
    if width == 1:
        return Unread(chosen.reshape(shape), mx.ones((rows.num_rows,), mx.int32), hidden)
    ends = np.asarray(rows.starts[1:], np.int32)[:, None] - 1
    places = np.minimum(
        np.asarray(rows.starts[:-1], np.int32)[:, None] + np.arange(width, dtype=np.int32), ends
    )
    if not rows.is_uniform:
        index = mx.array(places.reshape(-1))
        given, chosen, hidden = given[index], chosen[index], hidden[index]
    given, chosen = given.reshape(shape), chosen.reshape(shape)
    is_right = given[:, 1:] == chosen[:, :-1]
    if not rows.is_uniform:
        is_right = is_right & mx.array(places[:, 1:] > places[:, :-1])
    accepted = mx.cumprod(is_right.astype(mx.int32), axis=1)
    return Unread(chosen, 1 + accepted.sum(axis=1), hidden)


def _buffer_bytes(cache: ModelCache) -> int:
    """Return the bytes of the buffers that hold a cache's keys and values."""
    return sum(x.nbytes for layer in cache.layers if not layer.is_recurrent for x in layer.arrays)
