"""Rows that decode behind texts of any length, whose keys and values are random numbers that nobody computed, and what a step of the engine
costs the host there, in counts.

Reading 128k tokens with attention takes minutes on a CPU even for a tiny model. What a step costs the host does not depend on the numbers
in the cache. So a state with random keys and values is put into the prefix cache, and the request goes on from it as from any other state.
"""

from __future__ import annotations

import gc
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from unittest import mock

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.snapshot import Snapshot
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Drafter
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.drafters.policy import RoundPlan
from mlxspec.engine import pipeline
from mlxspec.engine import round as rounds
from mlxspec.engine.engine import Engine
from mlxspec.engine.prefix.tree import TARGET, KeyedText
from mlxspec.engine.request import Request
from mlxspec.platform import device
from mlxspec.sampling import noise
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models

PARAGRAPH = 400  # tokens; a text is made of a few of them, so that lookups find many places
MAX_CONTEXT = 1 << 18
LENGTHS = 2048, 16_384, 65_536, 131_072


@cache
def models(stack: str):  # type: ignore[no-untyped-def]
    """A target with one small head of keys and values in each attention layer, and its MTP head. stack: as in tiny_models."""
    c = tiny_models.config(tiny_models.STACKS[stack], max_context=MAX_CONTEXT)
    c = replace(c, num_kv_heads=1, head_dim=32)
    target = tiny_models.make(c)
    return target, tiny_models.make_mtp(c, target)


def text(length: int, seed: int = 0) -> list[int]:
    """Paragraphs of random tokens in random order, each many times."""
    rng = np.random.default_rng(seed)
    some = rng.integers(0, tiny_models.EOS, (16, PARAGRAPH))
    order = rng.integers(0, len(some), -(-length // PARAGRAPH))
    return some[order].reshape(-1)[:length].tolist()  # type: ignore[no-any-return]


def lookups() -> list[Drafter]:
    return [
        ngram_lookup("ngram-simple", 3, 12),
        ngram_lookup("ngram-map-k", 8, 12),
        ngram_lookup("ngram-map-k4v", 8, 12),
    ]


def engine_behind(
    length: int,
    params: SamplingParams,
    spec: SpecConfig,
    *,
    stack: str = "hybrid",
) -> tuple[Engine, Request]:
    """An engine whose one row decodes behind `length` tokens."""
    target, head = models(stack)
    mtp = Mtp(head, MAX_CONTEXT)
    config = EngineConfig(prefix_budget=1 << 30)
    made = Engine(target, tiny_models.tokenizer(), drafters=[*lookups(), mtp], config=config)
    prompt = text(length)
    known = prompt[:-1]
    parts = {TARGET: made_up(target.make_cache(1), len(known))}
    parts["mtp"] = made_up(mtp._make_cache(1), len(known))
    assert made.prefix.tree.put(KeyedText(known), len(known), parts, mx.zeros((1, target.hidden_size)))
    made.prefix.limit(1 << 30)
    request = made.submit(prompt, replace(params, ignore_eos=True), spec=spec)
    while not made.places.rows:
        made.step()
    assert request.stats.num_cached == len(known)
    made.prefix.limit(0)  # what is kept is not what a step costs
    return made, request


def made_up(cache: ModelCache, length: int) -> Snapshot:
    """A state behind `length` tokens, of random numbers: the same whatever ran before."""
    kv, point = [], []
    keys = iter(mx.random.split(mx.random.key(length), 256))
    for layer in cache.layers:
        if layer.is_per_token:
            heads, size = layer.shape
            kv.append(
                tuple(0.1 * mx.random.normal((1, heads, length, size), key=next(keys)) for _ in range(2))
            )
        else:
            point.append(
                tuple(
                    0.1 * mx.random.normal(x.shape, key=next(keys)).astype(x.dtype)
                    for x in layer.snapshot(0, 0, 0)
                )
            )
    mx.eval(kv, point)
    return Snapshot(length, [kv], point)  # type: ignore[list-item]


# Who drafted how many tokens, for each row of a step's rounds. `auto` chooses by measured times, so two runs are compared where they agree.
Drafts = tuple[tuple[str | None, int], ...]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Of one step, medians over several. calls: of Python and C functions, the least by the step's drafts; python_bytes: the most that
    Python's allocator held beyond what it held before; kept_bytes: what of it stayed, over all steps together; mlx_bytes: the most that
    MLX held beyond; nodes: of the graphs of its rounds, drafts included, likewise; host_seconds: of the engine's own thread, without
    waiting and without MLX's threads, the least of the steps; tokens: of the answer, all steps together."""

    calls: Mapping[Drafts, int]
    python_bytes: int
    kept_bytes: int
    mlx_bytes: int
    nodes: Mapping[Drafts, int]
    host_seconds: float
    tokens: int


def step_work(engine: Engine, request: Request, *, steps: int = 8, warm: int = 4) -> StepWork:
    """Counts of `steps` steps for each count, behind some that bring what is made once."""
    noise._words.cache_clear()  # a table that other tests have nearly filled would grow by thousands of places in some step
    for _ in range(warm):
        engine.step()
    before = request.num_generated
    seconds = []
    for _ in range(steps):
        started = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - started)
    calls = _by_drafts(lambda: _calls(engine.step), steps)
    gc.collect()
    tracemalloc.start()
    try:
        held, peaks = tracemalloc.get_traced_memory()[0], []
        for _ in range(steps):
            tracemalloc.reset_peak()
            start = tracemalloc.get_traced_memory()[0]
            engine.step()
            peaks.append(tracemalloc.get_traced_memory()[1] - start)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - held
    finally:
        tracemalloc.stop()
    nodes = _by_drafts(lambda: _nodes(engine), steps)
    mlx = []
    for _ in range(steps):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        engine.step()
        mlx.append(mx.get_peak_memory() - active)
    return StepWork(
        calls=calls,
        python_bytes=sorted(peaks)[steps // 2],
        kept_bytes=kept,
        mlx_bytes=sorted(mlx)[steps // 2],
        nodes=nodes,
        host_seconds=min(seconds),
        tokens=request.num_generated - before,
    )


def _by_drafts(count: Callable[[], int], steps: int) -> dict[Drafts, int]:
    """What is counted in steps, by what the rounds of a step verify: the least, where they verified it twice. The first time makes more."""
    found: dict[Drafts, list[int]] = {}
    forward, drafts = rounds.verify, []

    def noted(
        requests: Sequence[Request], plan: RoundPlan, *arguments: object, **options: object
    ) -> rounds.Round:
        given = [plan.draft(request.number) for request in requests]
        drafts.extend((draft.drafter if draft.width else None, draft.width) for draft in given)
        return forward(requests, plan, *arguments, **options)  # type: ignore[arg-type]

    with mock.patch.object(rounds, "verify", noted), mock.patch.object(pipeline, "verify", noted):
        for _ in range(steps):
            drafts.clear()
            num = count()
            found.setdefault(tuple(drafts), []).append(num)
    return {k: min(v) for k, v in found.items() if len(v) > 1}


def _nodes(engine: Engine) -> int:
    """Of the graphs that a step builds, one round evaluated before the next is built."""
    num, forward = 0, rounds.verify

    def counted(*arguments: object, **options: object) -> rounds.Round:
        nonlocal num
        made = forward(*arguments, **options)  # type: ignore[arg-type]
        assert engine.places.rows.cache is not None
        num += graph_nodes(*made.sampled.arrays, *engine.places.rows.cache.arrays)
        mx.eval(made.sampled.arrays, engine.places.rows.cache.arrays)
        return made

    both = mock.patch.object(rounds, "verify", counted), mock.patch.object(pipeline, "verify", counted)
    with device.hold(), both[0], both[1]:
        engine.step()
    return num


def graph_nodes(*outputs: mx.array) -> int:
    """Primitives behind arrays that have not been evaluated."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        return len(re.findall(r"shape=rectangle", file.read_text()))


def _calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions that it makes."""
    num = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num


def lookup_seconds(drafter: Drafter, tokens: Sequence[int], *, times: int = 200) -> tuple[float, float]:
    """Of a lookup in a text, and of hearing one more token of it: medians. Each lookup is behind another token."""
    length = len(tokens) - times
    drafter.begin(0)
    drafter.hear(0, tokens[:length], None)
    sampler = RowSampler(SamplingParams(), [], tiny_models.VOCAB)
    batch = BatchSampler([sampler], tiny_models.VOCAB)
    looked, heard = [], []
    for i in range(times):
        history = tokens[: length + i]
        started = time.perf_counter()
        drafter.draft([Ask(0, history, 12, sampler)], batch)
        between = time.perf_counter()
        drafter.hear(0, tokens[length + i : length + i + 1], None)
        looked.append(between - started)
        heard.append(time.perf_counter() - between)
    drafter.forget(0)
    return sorted(looked)[times // 2], sorted(heard)[times // 2]


def lookup_calls(drafter: Drafter, tokens: Sequence[int], *, times: int = 50) -> int:
    """The most calls that a lookup and hearing one more token make, over the last tokens of a text."""
    length = len(tokens) - times
    drafter.begin(0)
    drafter.hear(0, tokens[:length], None)
    sampler = RowSampler(SamplingParams(), [], tiny_models.VOCAB)
    batch, most = BatchSampler([sampler], tiny_models.VOCAB), 0
    for i in range(times):
        history, token = tokens[: length + i], tokens[length + i : length + i + 1]

        def look(history: Sequence[int] = history, token: Sequence[int] = token) -> None:
            drafter.draft([Ask(0, history, 12, sampler)], batch)
            drafter.hear(0, token, None)

        most = max(most, _calls(look))
    drafter.forget(0)
    return most
