"""A prompt into a cache of its own, chunk by chunk, up to the first token of the answer. Knows one request; knows no rounds."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np

from mlxspec import device
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.rollback import TAPE, Rollback
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.engine.choice import choose
from mlxspec.engine.request import Request
from mlxspec.events import Event
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model


def prefill(
    request: Request, model: Model, chain: Chain, chunk: int, rollback: Rollback = TAPE
) -> tuple[ModelCache, list[Event]]:
    """Run the whole prompt, tell the drafters of it, sample the first token. Returns a cache of one row."""
    started = time.perf_counter()
    device.prefill_threads()
    cache = model.make_cache(1, rollback)
    prompt, drafts = request.prompt, bool(request.spec.drafters)
    carry = mx.zeros((1, model.hidden_size))  # what stands before the first token
    for begin in range(0, len(prompt), chunk):
        piece = prompt[begin : begin + chunk]
        last = begin + chunk >= len(prompt)
        rows = FlatRows((len(piece),))
        tokens = mx.array(np.asarray(piece, np.int32))
        out = model.forward(tokens, rows, cache, facts=True, logits_at="last" if last else "none")
        cache.commit()
        mx.eval(out.logits if last else out.hidden, cache.arrays)
        if drafts and chain.needs_hidden:
            before = mx.concatenate([carry.astype(out.hidden.dtype), out.hidden[:-1]])
            chain.observe(request.number, piece, before)
            carry = out.hidden[-1:]
        elif drafts:
            chain.observe(request.number, piece, None)
    device.decode_threads()
    if out.logits is None:
        raise ValueError("an empty prompt has no first token")
    choice = choose([request], [Proposal()], FlatRows((1,)), mx.array(prompt[-1:], mx.int32), out.logits)
    mx.eval(choice.arrays)
    first = int(choice.sampled.item())
    _, failure = choice.take(0, [first])
    if failure is not None:
        events = request.fail(failure)
    else:
        events = request.accept([first], logprobs=request.read_logprobs(choice.logprobs, [first], 0))
    if drafts and request.finish_reason is None:
        chain.observe(request.number, [first], carry if chain.needs_hidden else None)
    request.stats.prefill_seconds = time.perf_counter() - started
    return cache, events
