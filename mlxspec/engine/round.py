"""One round over all decoding rows: draft, verify in one target forward, accept, commit. The heart of the engine.

Knows the order of things and who must hear of what; knows no queue, no prompts and no events' audience.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.engine.request import Request
from mlxspec.engine.stats import EngineStats
from mlxspec.events import Event
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from mlxspec.sampling.sampler import BatchSampler
from mlxspec.speculation.verify import match

_PLAIN = Proposal()


def run_round(
    requests: Sequence[Request], model: Model, cache: ModelCache, chain: Chain, stats: EngineStats
) -> list[Event]:
    """Requests in cache order, each with its last token sampled but not in the cache. Every row advances by at least one token.

    If anything fails on the way the cache is as it was before, and so are the requests.
    """
    started = time.perf_counter()
    rooms = {r.number: r.room for r in requests if r.room > 0 and r.spec.drafters}
    won = chain.propose(rooms, {r.number: r.history for r in requests}, model.vocab_size) if rooms else {}
    proposals = [won.get(r.number, _PLAIN) for r in requests]
    drafted_at = time.perf_counter()

    rows = FlatRows(tuple(1 + p.draft.length for p in proposals))
    tokens = _flatten(requests, proposals)
    try:
        # without drafts every token is a fact, and recurrent states advance directly
        out = model.forward(tokens, rows, cache, facts=not won)
        sampled = _sample(requests, rows, tokens, out.logits, model.vocab_size)
        mx.eval(sampled, tokens, out.hidden, cache.arrays)  # the round's synchronisation
        chosen, given = np.asarray(sampled).tolist(), np.asarray(tokens).tolist()
        kept = []
        for r in range(rows.num_rows):
            start, end = rows.starts[r], rows.starts[r + 1]
            kept.append(match(given[start + 1 : end], chosen[start:end]))
    except BaseException:
        cache.abort()
        raise
    cache.commit([k + 1 for k in kept])

    events: list[Event] = []
    for r, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
        start = rows.starts[r]
        new = chosen[start : start + kept[r] + 1]
        request.count(proposal.drafter, proposal.draft.length, kept[r])
        events += request.accept(new, num_drafted=kept[r], drafter=proposal.drafter)
        if request.finish_reason is None and request.spec.drafters:
            chain.observe(request.number, new, out.hidden[start : start + len(new)] if chain.needs_hidden else None)
        stats.num_emitted += len(new)
    stats.num_rounds += 1
    stats.num_plain_rounds += not won
    stats.num_verified += rows.num_tokens
    stats.draft_seconds += drafted_at - started
    _charge(requests, time.perf_counter() - started)
    stats.round_seconds += time.perf_counter() - started
    return events


def _flatten(requests: Sequence[Request], proposals: Sequence[Proposal]) -> mx.array:
    """Each row's last token and its draft, (N,) int32. Drafts still on the device stay there."""
    if all(isinstance(p.draft.tokens, list) for p in proposals):
        flat: list[int] = []
        for request, proposal in zip(requests, proposals, strict=True):
            flat += [request.history[-1], *proposal.draft.tokens]  # type: ignore[misc]
        return mx.array(np.asarray(flat, np.int32))
    parts = []
    for request, proposal in zip(requests, proposals, strict=True):
        parts += [mx.array([request.history[-1]], mx.int32), mx.array(proposal.draft.tokens).astype(mx.int32)]
    return mx.concatenate([p for p in parts if p.size])


def _sample(requests: Sequence[Request], rows: FlatRows, tokens: mx.array, logits: mx.array | None, vocab_size: int) -> mx.array:
    """The target's own choice at every verified position, (N,)."""
    if logits is None:
        raise ValueError("a verify needs logits at every position")
    sampler = BatchSampler([r.sampler for r in requests], vocab_size)
    owners = [r for r, width in enumerate(rows.widths) for _ in range(width)]
    positions = [len(request.history) + i for request, w in zip(requests, rows.widths, strict=True) for i in range(w)]
    drafts = _drafts_before(rows, tokens, vocab_size) if sampler.needs_drafts and rows.max_width > 1 else None
    return sampler.sample(logits, owners, positions, drafts)


def _drafts_before(rows: FlatRows, tokens: mx.array, vocab_size: int) -> mx.array:
    """(N, V) float32: how often each token is among the drafts read up to each position of its row."""
    before = np.zeros((rows.num_tokens, rows.num_tokens), np.float32)
    for start, end in zip(rows.starts, rows.starts[1:], strict=False):
        for i in range(start + 1, end):
            before[i, start + 1 : i + 1] = 1.0
    one_hot = (tokens[:, None] == mx.arange(vocab_size)[None]).astype(mx.float32)
    return mx.array(before) @ one_hot


def _charge(requests: Sequence[Request], seconds: float) -> None:
    for request in requests:
        request.stats.decode_seconds += seconds
