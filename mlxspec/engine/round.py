"""One round over all decoding rows: draft, verify in one target forward, accept, commit.

A round is launched and then read. Reading is its one synchronisation (reading drafts before they are verified costs another). pipeline.py
decides whether the next round is launched before this one has been read; the functions of a round are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import MAX_DRAFT
from mlxspec.drafters.base import Draft
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

PLAIN = RoundPlan()


@dataclass(frozen=True, kw_only=True)
class Round:
    """A launched target forward over all decoding rows. plan: the drafts and the policies' choices; drafts: one for each row. tokens
    (N,), sampled, and hidden (N, H) are lazy; where a request shows layers, hidden is the result of `Streams.join`. is_open: whether
    its cache transaction is still open. is_warm: whether nothing was compiled in it or in its drafts. unmasked: places of the rows in
    which a tag may begin a grammar, and whose tokens the host did not know when they were sampled. logits (N, V): lazy; None where
    there are no such rows."""

    requests: tuple[Request, ...]
    plan: RoundPlan
    drafts: tuple[Draft, ...]
    rows: FlatRows
    tokens: mx.array
    sampled: Sampled
    hidden: mx.array
    is_open: bool
    is_warm: bool
    unmasked: tuple[int, ...] = ()
    logits: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """Return the arrays that reading the round waits for."""
        return [*self.sampled.arrays, *(x for d in self.drafts for x in d.lazy)]


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
    """Draft for every row, launch the verify, and return the round. If anything fails, the cache is unchanged. requests: in the cache's
    order, each with its last token sampled but not in the cache. widest: most tokens over all rows; None: no limit."""
    started = time.perf_counter()
    limit = MAX_DRAFT if widest is None else min(MAX_DRAFT, widest // len(requests) - 1)
    rooms = {r.number: max(0, min(r.room, limit)) for r in requests if r.spec.drafters}
    drafts.attach(cache, [r.number for r in requests])
    plan = (drafts.propose(rooms) if any(rooms.values()) else None) or PLAIN
    drafted = time.perf_counter()
    stats.draft_seconds += drafted - started
    tokens = flatten([r.history[-1] for r in requests], [plan.draft(r.number) for r in requests])
    device.start(tokens)
    launched = verify(requests, plan, tokens, model, cache, drafts)
    stats.verify_seconds += time.perf_counter() - drafted
    return launched


class Accepted(NamedTuple):
    """The accepted part of a round. events: for the callers. counts: for each row, how many drafted tokens its answer took. has_changed:
    whether a row continues with other tokens than `sampled`, because a tag in its text began a grammar."""

    events: list[Event]
    counts: list[int]
    has_changed: bool


def read(round_: Round, cache: ModelCache, drafts: Drafts, stats: EngineStats) -> list[Event]:
    """Wait for a round, accept, commit, and return its events. Only tokens that an answer took enter the cache, none after its end."""
    wait(round_, cache, stats)
    found = accept(round_, drafts, stats)
    commit(round_, cache, found.counts)
    return found.events


def wait(round_: Round, cache: ModelCache, stats: EngineStats) -> None:
    """Wait until a round is computed. If its computation fails, the cache's transaction is aborted and the error raised."""
    started = time.perf_counter()
    try:
        mx.eval(round_.arrays, round_.tokens)
    except BaseException:
        cache.abort()
        raise
    stats.verify_seconds += time.perf_counter() - started


def commit(round_: Round, cache: ModelCache, counts: Sequence[int]) -> None:
    """Commit the token before each row's draft and the accepted drafted tokens. counts: accepted drafted tokens by row."""
    if round_.is_open:
        cache.commit([1 + num for num in counts])
        if not cache.defers:
            cache.flush()
            device.start(*cache.states)  # while the host is busy with what was read


def accept(round_: Round, drafts: Drafts, stats: EngineStats) -> Accepted:
    """Give a computed round's tokens to requests and drafters, and return what was accepted. An error of one row ends only that row."""
    rows = round_.rows
    chosen, given = numbers(round_.sampled.tokens).tolist(), numbers(round_.tokens).tolist()
    events: list[Event] = []
    counts, has_changed = list[int](), False
    hiddens = _by_row(round_) if drafts.needs_hidden else None
    for place, request in enumerate(round_.requests):
        start, end = rows.starts[place], rows.starts[place + 1]
        draft, own = given[start + 1 : end], chosen[start:end]
        num_accepted = match(draft, own)
        request.stats.widest = max(request.stats.widest, rows.num_tokens)
        if request.finish_reason is None:
            try:
                sampled = _masked(round_, place, draft[:num_accepted])
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
        counts.append(num_accepted)
    stats.num_rounds += 1
    stats.num_plain_rounds += rows.max_width == 1
    stats.num_verified += rows.num_tokens
    return Accepted(events, counts, has_changed)


def _masked(round_: Round, place: int, accepted: Sequence[int]) -> Sampled | None:
    """Return the tokens of a row, sampled again under its grammar, where the row was sampled without it and a tag began it in the round
    before or among the accepted drafted tokens; None where no token is forbidden. place: index of the row. accepted: its accepted
    drafted tokens."""
    request, logits = round_.requests[place], round_.logits
    if place not in round_.unmasked or logits is None or request.constraints is None:
        return None
    if all(mask is None for mask in request.constraints.masks(accepted)):
        return None
    start, end = round_.rows.starts[place], round_.rows.starts[place + 1]
    tokens = round_.tokens[start:end]
    known = round_.drafts[place]._replace(tokens=numbers(tokens).tolist()[1:])
    return sample_round([request], [known], tokens, logits[start:end])


def _by_row(round_: Round) -> Sequence[mx.array]:
    """Return the hidden states (width, H) of each row, split in one operation."""
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
    """Add a row's accepted tokens and the one after them to its answer, give the tokens that the answer took to the drafters, and return
    the events. found: the sampled tokens, the row's index in them, and its first place. chosen: the target's token at each of the
    row's places. hiddens: hidden states by row, None where no drafter needs them."""
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


def verify(
    requests: Sequence[Request],
    plan: RoundPlan,
    tokens: mx.array,
    model: Model,
    cache: ModelCache,
    drafts: Drafts,
    *,
    ahead: int | Ahead = 0,
) -> Round:
    """Launch the forward over each row's newest token and its draft, sample, and return the round. tokens (N,): the flattened newest and
    drafted tokens. ahead: as in `sample_round`."""
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
        unmasked = tuple(
            i
            for i, (r, d) in enumerate(zip(requests, given, strict=True))
            if r.sampler.is_waiting and not (ahead == 0 and d.is_read)
        )
        device.launch(*sampled.arrays, *(x for d in given for x in d.lazy))
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
        unmasked=unmasked,
        logits=out.logits if unmasked else None,
    )


def sample_round(
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    tokens: mx.array,
    logits: mx.array,
    *,
    ahead: int | Ahead = 0,
) -> Sampled:
    """Sample the target's token at each place. tokens (N,): each row's last token and its draft. logits (N, V): after each of them.
    ahead: number of tokens of each row that are launched but not in its history yet; an Ahead where only the device knows the number."""
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
    return sample(rows, tokens, logits, ahead=ahead)


def flatten(newest: Sequence[int] | mx.array, drafts: Sequence[Draft]) -> mx.array:
    """Return each row's newest token and its draft, one row after the other, (N,) int32. newest: (B,). Nothing is copied to the host."""
    if not isinstance(newest, mx.array):
        if all(draft.is_read for draft in drafts):
            flat = [t for first, d in zip(newest, drafts, strict=True) for t in (first, *d.tokens[: d.width])]
            return mx.array(np.asarray(flat, np.int32))
        newest = mx.array(list(newest), mx.int32)
    parts = []
    for first, draft in zip(mx.split(newest, len(drafts)), drafts, strict=True):
        parts.append(first)
        if draft.width:
            parts.append(mx.array(draft.tokens[: draft.width]).astype(mx.int32))
    return mx.concatenate(parts)
