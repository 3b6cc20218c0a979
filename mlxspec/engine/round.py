"""One round over all decoding rows: draft, verify in one target forward, accept, commit. The heart of the engine.

A round is launched and then read. Reading is its one synchronisation (trimming drafts by p_min or n_min costs another); a plain
round may be launched on the tokens of one that has not been read yet, so that the host builds while the device works. Knows the
order of things and who must hear of what; knows no queue, no prompts and no events' audience.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxspec import device
from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import MAX_DRAFT
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.engine.choice import Choice, choose_apart
from mlxspec.engine.request import Request
from mlxspec.engine.stats import EngineStats
from mlxspec.events import Event, TokensEvent
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from mlxspec.speculation.verify import match

_PLAIN = Proposal()


@dataclass(frozen=True, kw_only=True)
class Round:
    """A launched target forward. tokens (N,), choice and hidden (N, H) are lazy; is_open tells that its cache transaction is."""

    requests: tuple[Request, ...]
    proposals: tuple[Proposal, ...]
    rows: FlatRows
    tokens: mx.array
    choice: Choice
    hidden: mx.array
    is_open: bool


def launch(
    requests: Sequence[Request],
    model: Model,
    cache: ModelCache,
    chain: Chain,
    stats: EngineStats,
    *,
    widest: int | None = None,
) -> Round:
    """Draft for every row and put the verify on its way. Requests in cache order, each with its last token sampled but not in the cache.

    widest: at most so many tokens over all rows. If anything fails the cache is as it was before.
    """
    started = time.perf_counter()
    limit = MAX_DRAFT if cache.max_rollback is None else cache.max_rollback
    if widest is not None:
        limit = min(limit, (widest - len(requests)) // len(requests))
    rooms = {r.number: min(r.room, limit) for r in requests if r.spec.drafters and min(r.room, limit) > 0}
    chain.attach(cache, [r.number for r in requests])
    won = chain.propose(rooms, {r.number: r.history for r in requests}, model.vocab_size) if rooms else {}
    proposals = tuple(won.get(r.number, _PLAIN) for r in requests)
    drafted = time.perf_counter()
    stats.draft_seconds += drafted - started
    tokens = _flatten(requests, proposals)
    device.start(tokens)
    launched = _forward(requests, proposals, tokens, model, cache, ahead=0)
    stats.verify_seconds += time.perf_counter() - drafted
    return launched


def launch_behind(
    last: Round,
    requests: Sequence[Request],
    model: Model,
    cache: ModelCache,
    chain: Chain,
    stats: EngineStats,
) -> Round | None:
    """A plain round on the tokens of a plain one that has not been read; None where the host must see those tokens first.

    A row that turns out to have ended gets one token more than it needed, which nobody reads; rows do not see each other.
    """
    if last.is_open or any(not r.sampler.is_plain for r in requests):
        return None
    if any(r.sampler.needs_tokens(2) for r in requests):
        return None  # what may come there depends on a token that nobody has read
    places = {r.number: i for i, r in enumerate(last.requests)}
    if any(r.number not in places for r in requests) or all(r.room == 0 for r in requests):
        return None
    if any(len(r.history) + 1 >= r.max_context for r in requests):
        return None  # the row must not be run past its context
    rooms = {r.number: r.room for r in requests if r.spec.drafters}
    started = time.perf_counter()
    rests = not rooms or chain.rests(rooms, {r.number: r.history for r in requests}, model.vocab_size)
    drafted = time.perf_counter()
    stats.draft_seconds += drafted - started
    if not rests:
        return None  # somebody may draft
    tokens = last.choice.sampled
    if len(requests) < len(last.requests):
        tokens = tokens[mx.array([places[r.number] for r in requests])]
    launched = _forward(requests, (_PLAIN,) * len(requests), tokens, model, cache, ahead=1)
    stats.verify_seconds += time.perf_counter() - drafted
    return launched


def read(round_: Round, cache: ModelCache, chain: Chain, stats: EngineStats) -> list[Event]:
    """Wait for a round, accept, commit, tell everybody. Every row that still runs advances by at least one token, or ends: what goes
    wrong in the host's work for a row ends that row only.

    Committed is what requests took: behind the end of an answer nothing enters the cache.
    """
    rows = round_.rows
    started = time.perf_counter()
    try:
        mx.eval(round_.choice.arrays, round_.tokens)
        chosen, given = np.asarray(round_.choice.sampled).tolist(), np.asarray(round_.tokens).tolist()
    except BaseException:
        cache.abort()
        raise
    stats.verify_seconds += time.perf_counter() - started
    events: list[Event] = []
    kept = []
    hiddens = _by_row(round_) if chain.needs_hidden else None
    for place, request in enumerate(round_.requests):
        start, end = rows.starts[place], rows.starts[place + 1]
        stood = match(given[start + 1 : end], chosen[start:end])
        taken = stood + 1
        if request.finish_reason is None:
            before = len(request.history)
            try:
                events += _take(request, round_, place, chosen[start : start + stood + 1], chain, hiddens)
            except Exception as error:  # this row's own: a grammar, a tokenizer, a processor
                request.fail(error)
            taken = len(request.history) - before
            stats.num_emitted += taken + (request.end_token is not None)
            if round_.is_open:
                request.tail = (round_.hidden, start + min(stood, taken))
        kept.append(min(stood, taken) + 1)
    if round_.is_open:
        cache.commit(kept)
    stats.num_rounds += 1
    stats.num_plain_rounds += rows.max_width == 1
    stats.num_verified += rows.num_tokens
    return events


def _by_row(round_: Round) -> Sequence[mx.array]:
    """Each row's hiddens (width, H), in one operation."""
    starts = round_.rows.starts
    return [round_.hidden] if len(starts) == 2 else mx.split(round_.hidden, list(starts[1:-1]))


def _take(
    request: Request,
    round_: Round,
    place: int,
    chosen: list[int],
    chain: Chain,
    hiddens: Sequence[mx.array] | None,
) -> list[TokensEvent]:
    """Give a row its tokens, and the drafters those that count. hiddens: each row's, if any drafter wants them."""
    proposal, start, before = round_.proposals[place], round_.rows.starts[place], len(request.history)
    stood = len(chosen) - 1
    new, failure = round_.choice.take(place, chosen)
    request.count(proposal.drafter, proposal.draft.length, stood)
    logprobs = request.read_logprobs(round_.choice.logprobs, new, start)
    events = request.accept(new, num_drafted=stood, drafter=proposal.drafter, logprobs=logprobs)
    if failure is not None:
        request.fail(failure)
    heard = new[: len(request.history) - before + (request.end_token is not None)]
    if request.spec.drafters and request.error is None:
        hidden = None if hiddens is None else hiddens[place]
        if hidden is not None and len(heard) < hidden.shape[0]:
            hidden = hidden[: len(heard)]
        chain.observe(request.number, heard, hidden)
    return events


def _forward(
    requests: Sequence[Request],
    proposals: tuple[Proposal, ...],
    tokens: mx.array,
    model: Model,
    cache: ModelCache,
    *,
    ahead: int,
) -> Round:
    """ahead: how many tokens of each row are on their way but not in its history yet."""
    rows = FlatRows(tuple(1 + p.draft.length for p in proposals))
    plain = rows.max_width == 1
    try:
        # without drafts every token is a fact: recurrent states advance directly and there is nothing to decide
        out = model.forward(tokens, rows, cache, facts=plain)
        if out.logits is None:
            raise ValueError("a verify needs logits at every position")
        if any(r.sampler.constraints is not None for r in requests):
            mx.async_eval(out.logits)  # the device computes while the host finds out what may come
        choice = choose_apart(requests, proposals, rows, tokens, out.logits, ahead=ahead)
        mx.async_eval(choice.arrays)
    except BaseException:
        cache.abort()
        raise
    if plain:
        cache.commit()
        for place, request in enumerate(requests):
            request.tail = (out.hidden, place)
    return Round(
        requests=tuple(requests),
        proposals=proposals,
        rows=rows,
        tokens=tokens,
        choice=choice,
        hidden=out.hidden,
        is_open=not plain,
    )


def _flatten(requests: Sequence[Request], proposals: Sequence[Proposal]) -> mx.array:
    """Each row's last token and its draft, (N,) int32. Drafts still on the device stay there."""
    if all(isinstance(p.draft.tokens, list) for p in proposals):
        flat: list[int] = []
        for request, proposal in zip(requests, proposals, strict=True):
            flat += [request.history[-1], *proposal.draft.tokens]  # type: ignore[misc]
        return mx.array(np.asarray(flat, np.int32))
    parts = []
    for request, proposal in zip(requests, proposals, strict=True):
        parts.append(mx.array([request.history[-1]], mx.int32))
        if proposal.draft.length:
            parts.append(mx.array(proposal.draft.tokens).astype(mx.int32))
    return mx.concatenate(parts)
