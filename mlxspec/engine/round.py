"""One round over all decoding rows: draft, verify in one target forward, accept, commit. The heart of the engine.

A round is launched and then read. Reading is its one synchronisation (reading drafts before they are verified costs another). The next
round may be launched before, on tokens that only the device knows, so that the host builds while the device works: a plain round behind a
plain round, or any round whose drafts nobody needs to see. Invariants of the second kind:
    the number of accepted tokens is an array wherever it is used (newest token, ends of keys and values, replay counts, noise's positions);
    shapes do not depend on it, and the host's lengths are upper bounds until the first round has been read;
    reading makes lengths exact again, so at most one commit is unread, and none between two steps of the engine;
    the second round is an open transaction until it is read. If a row leaves before, it is aborted, which leaves everything as though it
    had not been launched: drafters draft for it on forks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import MAX_DRAFT
from mlxspec.drafters.base import Draft, Unread
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.policy import RoundPlan
from mlxspec.engine.request import Request
from mlxspec.engine.stats import EngineStats
from mlxspec.events import Event, TokensEvent
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from mlxspec.platform import device
from mlxspec.platform.host import numbers
from mlxspec.sampling.acceptance import match
from mlxspec.sampling.round import Ahead, RoundRow, Sampled, sample

_PLAIN = RoundPlan()


@dataclass(frozen=True, kw_only=True)
class Round:
    """A launched target forward. plan: who drafted and why; drafts: of its rows. tokens (N,), sampled and hidden (N, H) are lazy; hidden is
    what `Streams.join` gives where a request shows layers. is_open: its cache transaction is still open. is_warm: nothing was compiled in
    it or in its drafts. blind: places of rows in which a tag may open a grammar, and whose tokens nobody knew when they were sampled.
    logits (N, V), lazy: where there are such rows."""

    requests: tuple[Request, ...]
    plan: RoundPlan
    drafts: tuple[Draft, ...]
    rows: FlatRows
    tokens: mx.array
    sampled: Sampled
    hidden: mx.array
    is_open: bool
    is_warm: bool
    blind: tuple[int, ...] = ()
    logits: mx.array | None = None

    @property
    def unread(self) -> Unread:
        """The tokens that its rows continue with: the accepted drafts and the round's own token. Rows that are narrower than the widest one
        repeat their last place, which is never accepted."""
        rows, width = self.rows, self.rows.max_width
        shape, given, chosen, hidden = (rows.num_rows, width), self.tokens, self.sampled.tokens, self.hidden
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

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that reading it waits for."""
        return [*self.sampled.arrays, *(x for d in self.drafts for x in d.unread)]


@device.idle()
def launch(
    requests: Sequence[Request],
    model: Model,
    cache: ModelCache,
    drafts: Drafts,
    stats: EngineStats,
    *,
    widest: int | None = None,
) -> Round:
    """Draft for every row and launch the verify. Requests in cache order, each with its last token sampled but not in the cache.

    widest: at most so many tokens over all rows. If anything fails the cache is as it was before.
    """
    started = time.perf_counter()
    limit = MAX_DRAFT
    if widest is not None:
        limit = min(limit, (widest - len(requests)) // len(requests))
    rooms = {r.number: min(r.room, limit) for r in requests if r.spec.drafters and min(r.room, limit) > 0}
    drafts.attach(cache, [r.number for r in requests])
    plan = (drafts.propose(rooms) if rooms else None) or _PLAIN
    drafted = time.perf_counter()
    stats.draft_seconds += drafted - started
    tokens = _flatten([r.history[-1] for r in requests], [plan.draft(r.number) for r in requests])
    device.start(tokens)
    launched = _forward(requests, plan, tokens, model, cache, drafts, ahead=0)
    stats.verify_seconds += time.perf_counter() - drafted
    return launched


def launch_behind(
    last: Round,
    requests: Sequence[Request],
    model: Model,
    cache: ModelCache,
    drafts: Drafts,
    stats: EngineStats,
    *,
    may_draft: bool = True,
    holds: bool = False,
) -> Round | None:
    """A round on the tokens of one that has not been read, see above; None if the host must read those tokens first.

    A row that turns out to have ended gets tokens that nobody reads; rows do not see each other. may_draft: whether it may have drafts.
    holds: the round is built, and the device is to begin on it only when `read` is told so as well.
    """
    if holds:
        with device.hold():
            return launch_behind(last, requests, model, cache, drafts, stats, may_draft=may_draft)
    # what may come there must not depend on a token that nobody has read
    if any(not r.sampler.is_plain or r.sampler.needs_tokens(1 + last.rows.max_width) for r in requests):
        return None
    started = time.perf_counter()
    if last.is_open:
        return _drafted_behind(last, requests, model, cache, drafts, stats)
    places = {r.number: i for i, r in enumerate(last.requests)}
    if any(r.number not in places for r in requests) or all(r.room == 0 for r in requests):
        return None
    if any(len(r.history) + 1 >= r.max_context for r in requests):
        return None  # the row must not be run past its context
    rooms = {r.number: r.room for r in requests if r.spec.drafters}
    rests = not rooms or drafts.rests(rooms)
    drafted = time.perf_counter()
    stats.draft_seconds += drafted - started
    if not rests:  # somebody may draft
        return _drafted_behind(last, requests, model, cache, drafts, stats) if may_draft else None
    tokens = last.sampled.tokens
    if len(requests) < len(last.requests):
        tokens = tokens[mx.array([places[r.number] for r in requests])]
    launched = _forward(requests, _PLAIN, tokens, model, cache, drafts, ahead=1)
    stats.verify_seconds += time.perf_counter() - drafted
    return launched


def _drafted_behind(
    last: Round,
    requests: Sequence[Request],
    model: Model,
    cache: ModelCache,
    drafts: Drafts,
    stats: EngineStats,
) -> Round | None:
    """Drafts and their verify behind the accepted tokens of `last`; None where nobody drafts."""
    started, width = time.perf_counter(), last.rows.max_width
    rooms = {r.number: r.room - width for r in requests}
    fits = cache.takes_unread and min(rooms.values()) >= 1
    if not fits or last.requests != tuple(requests):
        return None
    unread = last.unread
    drafted_for = [i for i, r in enumerate(requests) if r.spec.drafters]
    rooms = {requests[i].number: min(rooms[requests[i].number], MAX_DRAFT) for i in drafted_for}
    plan = drafts.propose(rooms, unread.select(drafted_for))
    drafted = time.perf_counter()
    stats.draft_seconds += drafted - started
    if plan is None or not any(d.width for d in plan.drafts.values()):
        return None
    if last.is_open:
        cache.commit(unread.num_committed)
    tokens = _flatten(unread.newest, [plan.draft(r.number) for r in requests])
    device.start(tokens)
    launched = _forward(requests, plan, tokens, model, cache, drafts, ahead=unread)
    stats.verify_seconds += time.perf_counter() - drafted
    return launched


def read(
    round_: Round,
    cache: ModelCache,
    drafts: Drafts,
    stats: EngineStats,
    *,
    behind: Round | None = None,
    holds: bool = False,
) -> tuple[list[Event], bool]:
    """Wait for a round, accept, commit, and tell requests and drafters. Every row that still runs advances by at least one token, or ends.
    An error in the host's work for a row ends that row only. Returns whether a row went on otherwise than the device knew, too.

    Only tokens that requests took are committed: nothing after the end of an answer enters the cache. behind: the next round, if it has
    been launched; it must be dropped if a row has ended or gone on otherwise. holds: the device has not begun on that.
    """
    rows = round_.rows
    started = time.perf_counter()
    try:
        mx.eval(round_.arrays, round_.tokens)
        if behind is not None and holds:
            mx.async_eval(behind.arrays)
        chosen, given = numbers(round_.sampled.tokens).tolist(), numbers(round_.tokens).tolist()
    except BaseException:
        cache.abort()
        raise
    stats.verify_seconds += time.perf_counter() - started
    events: list[Event] = []
    accepted, has_changed = [], False  # drafted tokens, by row
    hiddens = _by_row(round_) if drafts.needs_hidden else None
    for place, request in enumerate(round_.requests):
        start, end = rows.starts[place], rows.starts[place + 1]
        draft, own = given[start + 1 : end], chosen[start:end]
        num_accepted = match(draft, own)
        request.stats.widest = max(request.stats.widest, rows.num_tokens)
        if request.finish_reason is None:
            try:
                sampled = _held(round_, place, draft[:num_accepted])
                if sampled is not None:
                    before, own = own[: num_accepted + 1], numbers(sampled.tokens).tolist()
                    num_accepted = match(draft, own)
                    has_changed = has_changed or own[: num_accepted + 1] != before
                    stats.num_synchronised += 1
                found = (round_.sampled, place, start) if sampled is None else (sampled, 0, 0)
                events += _take(request, round_, place, found, own, num_accepted, drafts, hiddens)
            except Exception as error:  # this row's own: a grammar, a tokenizer, a processor
                request.fail(error)
            stats.num_emitted += len(request.newest) + (request.end_token is not None)
            num_accepted = min(num_accepted, len(request.newest))  # its answer may end within them
            if round_.is_open:
                request.tail = (round_.hidden, start + num_accepted)
        accepted.append(num_accepted)
    if cache.is_unread:
        cache.settle([1 + num for num in accepted])
    elif round_.is_open:
        cache.commit([1 + num for num in accepted])
        if not cache.defers:
            cache.flush()
            device.start(*cache.states)  # while the host is busy with what was read
    stats.num_rounds += 1
    stats.num_synchronised += behind is None
    stats.num_plain_rounds += rows.max_width == 1
    stats.num_verified += rows.num_tokens
    return events, has_changed


def _held(round_: Round, place: int, accepted: Sequence[int]) -> Sampled | None:
    """A blind row's tokens, sampled again under its grammar: a tag has come, in the round before or among its accepted drafts. None where
    nothing is forbidden."""
    request, logits = round_.requests[place], round_.logits
    constraints = request.constraints
    if place not in round_.blind or logits is None or constraints is None:
        return None
    if all(mask is None for mask in constraints.masks(accepted)):
        return None
    start, end = round_.rows.starts[place], round_.rows.starts[place + 1]
    tokens = round_.tokens[start:end]
    known = round_.drafts[place]._replace(tokens=numbers(tokens).tolist()[1:])
    return sample_round([request], [known], tokens, logits[start:end])


def _by_row(round_: Round) -> Sequence[mx.array]:
    """Each row's hiddens (width, H), in one operation."""
    starts = round_.rows.starts
    return [round_.hidden] if len(starts) == 2 else mx.split(round_.hidden, list(starts[1:-1]))


def _take(
    request: Request,
    round_: Round,
    place: int,
    found: tuple[Sampled, int, int],
    chosen: list[int],
    num_accepted: int,
    drafts: Drafts,
    hiddens: Sequence[mx.array] | None,
) -> list[TokensEvent]:
    """Give a row its accepted tokens and the one behind them, and the drafters those that the row took. found: what was sampled, the row's
    index there, and its first place. chosen: by the target, at each of the row's places. hiddens: each row's, if somebody needs them."""
    draft, (sampled, index, start) = round_.drafts[place], found
    drafter = draft.drafter if draft.width else None
    request.count(drafter, draft.width, num_accepted)
    tokens, failure = sampled.take(index, chosen[: num_accepted + 1])
    logprobs = request.read_logprobs(sampled.logprobs, tokens, start)
    events = request.accept(tokens, num_accepted=num_accepted, drafter=drafter, logprobs=logprobs)
    if failure is not None:
        request.fail(failure)
    tokens = tokens[: len(request.newest) + (request.end_token is not None)]
    hidden = None if hiddens is None else hiddens[place]
    if hidden is not None and len(tokens) < hidden.shape[0]:
        hidden = hidden[: len(tokens)]
    if request.spec.drafters and request.error is None:
        drafts.hear(request.number, tokens, hidden)
    return events


def _forward(
    requests: Sequence[Request],
    plan: RoundPlan,
    tokens: mx.array,
    model: Model,
    cache: ModelCache,
    drafts: Drafts,
    *,
    ahead: int | Unread,
) -> Round:
    """ahead: as in `sample_round`."""
    given = tuple(plan.draft(r.number) for r in requests)
    rows = FlatRows(tuple(1 + d.width for d in given))
    plain = rows.max_width == 1
    layers = drafts.streams.layers if any(r.shows_layers for r in requests) else ()
    is_warm, drafts.is_warm = drafts.is_warm, True
    try:
        # without drafts every token is certain: recurrent states advance directly and there is nothing to decide
        out = model.forward(tokens, rows, cache, certain=plain, taps=layers)
        hidden = drafts.streams.join(out)
        if out.logits is None:
            raise ValueError("a verify needs logits at every position")
        if any(r.sampler.is_bound for r in requests):
            mx.async_eval(out.logits)  # the device computes while the host finds out what may come
        sampled = sample_round(requests, given, tokens, out.logits, ahead=ahead)
        is_known = ahead == 0 if isinstance(ahead, int) else False
        blind = tuple(
            i
            for i, (r, d) in enumerate(zip(requests, given, strict=True))
            if r.sampler.is_waiting and not (is_known and d.is_read)
        )
        device.launch(*sampled.arrays, *(x for d in given for x in d.unread))
    except BaseException:
        cache.abort()
        raise
    if plain:
        cache.commit()
        for place, request in enumerate(requests):
            request.tail = (hidden, place)
    return Round(
        requests=tuple(requests),
        plan=plan,
        drafts=given,
        rows=rows,
        tokens=tokens,
        sampled=sampled,
        hidden=hidden,
        is_open=not plain,
        is_warm=is_warm and out.is_warm,
        blind=blind,
        logits=out.logits if blind else None,
    )


def sample_round(
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    tokens: mx.array,
    logits: mx.array,
    *,
    ahead: int | Unread = 0,
) -> Sampled:
    """The target's choices for logits (N, V) behind tokens (N,): each row's last token and its draft.

    ahead: how many tokens of each row are on their way but not in its history yet, or the round that they come from.
    """
    rows = [
        RoundRow(
            sampler=request.sampler,
            length=len(request.history),
            history=lambda request=request: request.shown,  # type: ignore[misc]
            draft=draft.tokens[: draft.width],
            num_drafted=draft.width,
        )
        for request, draft in zip(requests, drafts, strict=True)
    ]
    coming = Ahead(ahead.num_committed, ahead.width) if isinstance(ahead, Unread) else ahead
    return sample(rows, tokens, logits, ahead=coming)


def _flatten(newest: Sequence[int] | mx.array, drafts: Sequence[Draft]) -> mx.array:
    """Each row's newest token (B,) and its draft, (N,) int32. Tokens on the device stay there."""
    if not isinstance(newest, mx.array):
        if all(draft.is_read for draft in drafts):
            flat: list[int] = []
            for token, draft in zip(newest, drafts, strict=True):
                flat += [token, *draft.tokens[: draft.width]]  # type: ignore[misc]
            return mx.array(np.asarray(flat, np.int32))
        newest = mx.array(list(newest), mx.int32)
    parts = []
    for first, draft in zip(mx.split(newest, len(drafts)), drafts, strict=True):
        parts.append(first)
        if draft.width:
            parts.append(mx.array(draft.tokens[: draft.width]).astype(mx.int32))
    return mx.concatenate(parts)
