"""A walk over one engine's queue, places, memory and prefix cache: random submits, cancels, pauses, evictions, failures and interrupts.
After every step the books are right: bytes that are reserved are those of requests that are here, budgets hold, shares differ by one at
most, each request is here or has ended with one event, and nothing is left of a step that failed. Texts that came to their end are plain
ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.engine.places import Rows
from mlxspec.engine.prefix.tree import PrefixTree
from mlxspec.engine.request import Request
from mlxspec.errors import QueueFullError
from mlxspec.events import FinishEvent, TokensEvent
from tests import tiny_models
from tests.engine import equality

ROWS, STEPS, MOST = 3, 240, 600
SEEDS = (3, 4, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2, *range(6, 40))))
STORE = 200_000  # bytes: a few states
# What a step waits for or computes with: each may fail, or be interrupted.
PLACES: tuple[tuple[Any, str], ...] = (
    *3 * ((mx, "eval"),),  # parking a row waits for it
    (mx, "async_eval"),
    (Engine, "_begin"),
    (ModelCache, "begin"),
    (ModelCache, "commit"),
    (ModelCache, "snapshot"),
    *2 * ((ModelCache, "restore"),),
    (PrefixTree, "put"),
    (PrefixTree, "find"),
    (Mtp, "draft"),
    (Mtp, "hear"),
)
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: RuntimeError("[malloc] Unable to allocate"),
    MemoryError,
    KeyboardInterrupt,
)
_texts: dict[tuple[int, ...], list[int]] = {}


def made(**config: Any) -> Engine:
    model = tiny_models.target()
    drafters = [ngram_lookup("ngram-simple", 3, 12), Mtp(tiny_models.mtp_head(), model.max_context)]
    spec = SpecConfig(drafters=("ngram-simple", "mtp"), policy="fixed", ngram_m=12)
    return Engine(
        model,
        tiny_models.tokenizer(),
        drafters=drafters,
        spec=spec,
        config=EngineConfig(max_rows=ROWS, prefill_chunk=32, max_waiting=6, prefix_budget=STORE, **config),
    )


def plain(prompt: list[int], num: int) -> list[int]:
    """The text of plain decoding, alone."""
    key = (num, *prompt)
    if key not in _texts:
        found = equality.engine((), prefix_budget=0).generate(
            prompt, SamplingParams(max_tokens=num, ignore_eos=True)
        )
        _texts[key] = list(found.tokens)
    return _texts[key]


@dataclass
class Walk:
    """here: requests that were submitted, by number; said: their tokens; ends: how often each was told to have ended; did: what was refused
    and what failed; uneven: steps after which shares differed too much; is_cut: whether the last step did not come to its end.
    is_tight: whether memory is short, so that requests wait for it and not for a place."""

    engine: Engine
    rng: np.random.Generator
    monkeypatch: pytest.MonkeyPatch
    here: dict[int, Request] = field(default_factory=dict)
    said: dict[int, list[int]] = field(default_factory=dict)
    ends: Counter[int] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)
    uneven: int = 0
    is_cut: bool = False
    is_tight: bool = False

    def submit(self) -> None:
        begin = [int(t) for t in np.random.default_rng(int(self.rng.integers(3))).integers(1, 90, 40)]
        prompt = [*begin[: int(self.rng.integers(1, 41))], int(self.rng.integers(1, 90))]
        specs = (SpecConfig(), SpecConfig(drafters=("mtp",), policy="fixed", n_max=3), None)
        params = SamplingParams(max_tokens=int(self.rng.integers(1, 64)), ignore_eos=True)
        client = "abc"[int(self.rng.integers(3))]
        try:
            request = self.engine.submit(prompt, params, spec=specs[int(self.rng.integers(3))], client=client)
        except QueueFullError:
            self.did["refused"] += 1
        else:
            self.here[request.number] = request

    def cancel(self) -> None:
        live = [n for n, r in self.here.items() if r.finish_reason is None]
        if live:
            assert self.engine.cancel(int(self.rng.choice(live)))

    def rest(self) -> None:
        self.engine.rest(frozenset(n for n in self.here if self.rng.random() < 0.3))

    def wake(self) -> None:
        self.engine.rest(frozenset())

    def evict(self) -> None:
        self.engine.prefix.limit(int(self.rng.integers(STORE)))

    def step(self, *, may_fail: bool = True) -> None:
        with self.monkeypatch.context() as patch:
            error = self._plant(patch) if may_fail and self.rng.random() < 0.25 else None
            try:
                events = self.engine.step()
                self.is_cut = False
            except BaseException as raised:
                if raised is not error:
                    raise
                self.did[f"escaped {type(raised).__name__}"] += 1
                events, self.is_cut = [], True
        for event in events:
            if isinstance(event, TokensEvent):
                self.said.setdefault(event.request, []).extend(event.tokens)
            elif isinstance(event, FinishEvent):
                self.ends[event.request] += 1
        self.check()

    def _plant(self, patch: pytest.MonkeyPatch) -> BaseException:
        """Let one of the next calls of one place fail."""
        owner, name = PLACES[int(self.rng.integers(len(PLACES)))]
        right, error = getattr(owner, name), ERRORS[int(self.rng.integers(len(ERRORS)))]()
        left = [int(self.rng.integers(3))]

        def fails(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                self.did[f"{name} {type(error).__name__}"] += 1
                raise error
            return right(*args, **kwargs)

        patch.setattr(owner, name, fails)
        return error

    def check(self) -> None:
        engine, places = self.engine, self.engine.places
        live = {r.number for r in places.requests}
        for number, request in self.here.items():
            assert self.ends[number] <= 1
            is_over = request.finish_reason is not None
            assert is_over or number in live
            assert not is_over or number not in live or self.is_cut, request.finish_reason
        begun = [r for r in self.here.values() if r.number in live and r not in engine._queue]
        assert engine.memory.reserved == sum(map(engine.memory.needed, begun))
        assert engine.memory.weights + engine.memory.reserved <= engine.memory.budget
        assert engine.prefix.tree.nbytes <= engine.prefix.tree.budget <= STORE
        assert len(places.running) <= ROWS
        assert places.rows.nbytes >= sum(kept.nbytes for kept in places.rows.parked.values())
        assert len(places.rows) == 0 or places.rows.cache is not None
        assert engine._stepping is None
        if not live:
            assert engine.is_idle
            assert engine.nbytes == engine.memory.reserved == 0
        if not self.is_tight:
            self._check_shares()

    def _check_shares(self) -> None:
        """Clients that wait have no two places fewer than another, but until the round on its way has been read."""
        places = self.engine.places
        has = Counter(r.client for r in places.running)
        waits = [r.client for r in (*places.queue, *places.parked) if r.number not in self.engine._unread]
        most = max(has.values(), default=0)
        self.uneven = self.uneven + 1 if any(most > has[client] + 1 for client in waits) else 0
        assert self.uneven <= 2

    def run(self) -> None:
        acts = (self.submit, self.submit, self.submit, self.cancel, self.rest, self.wake, self.evict)
        for _ in range(STEPS):
            if self.rng.random() < 0.6:
                acts[int(self.rng.integers(len(acts)))]()
            self.step()
        self.wake()
        for _ in range(MOST):
            if self.engine.is_idle:
                break
            self.step(may_fail=False)
        self.step(may_fail=False)
        assert self.engine.is_idle
        assert all(self.ends[number] == 1 for number in self.here)
        for number, request in self.here.items():
            text = plain(list(request.prompt), request.params.max_tokens)
            said = self.said.get(number, [])
            if request.finish_reason == "length":
                assert request.history[len(request.prompt) :] == text
            assert said == text[: len(said)]


def keeps_bytes(_: Any) -> Any:
    return lambda self, request: None


def parks_at_once(_: Any) -> Any:
    def park(self: Rows, request: Request) -> None:
        kept = self.parked[request] = self.cache.snapshot(self.requests.index(request))  # type: ignore[union-attr]
        mx.eval(kept.arrays)
        self.leave([request])

    return park


def pops_first(_: Any) -> Any:
    def unpark(self: Rows, request: Request, cache: ModelCache) -> None:
        cache.restore(self.parked.pop(request))
        self.join(request, cache)

    return unpark


def begins_unguarded(right: Any) -> Any:
    """As if nothing were around it: what it raises leaves the request as it is."""

    def begin(self: Engine, request: Request) -> None:
        try:
            right(self, request)
        except BaseException as error:
            request.fail = lambda _: None  # type: ignore[method-assign]
            raise error

    return begin


@catches(
    "bytes of requests that left stay reserved",
    "mlxspec.engine.memory:EngineMemory.release",
    keeps_bytes,
    case="[3]",
)
@catches("nobody makes room", "mlxspec.engine.places:makes_room", lambda _: lambda *_: None, case="[3]")
@catches(
    "a row that cannot be parked is in two places",
    "mlxspec.engine.places:Rows.park",
    parks_at_once,
    case="[5]",
)
@catches("a row that cannot be restored is lost", "mlxspec.engine.places:Rows.unpark", pops_first, case="[3]")
@catches(
    "a request that cannot begin has no end",
    "mlxspec.engine.engine:Engine._begin",
    begins_unguarded,
    case="[5]",
)
@catches(
    "a smaller budget drops nothing",
    "mlxspec.engine.prefix.tree:PrefixTree.shrink",
    lambda _: lambda self, most: None,
    case="[3]",
)
@catches(
    "parked rows count for nothing",
    "mlxspec.engine.places:Rows.nbytes",
    lambda _: property(lambda self: 0 if self.cache is None else self.cache.nbytes),
    case="[3]",
)
@catches(
    "drafters keep rows that left",
    "mlxspec.drafters.drafts:Drafts.close",
    lambda _: lambda self, number: None,
    case="[3]",
)
@catches(
    "an end is not told",
    "mlxspec.engine.engine:Engine._leave",
    lambda right: lambda self, request: (right(self, request), self._outbox.clear())[0],
    case="[3]",
)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_are_right_after_every_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(made(), np.random.default_rng(seed), monkeypatch, is_tight=seed % 2 == 0)
    if walk.is_tight:
        memory = walk.engine.memory
        rows = 2 * (memory.row(110, walk.engine.spec) + 10_000)
        memory.budget = memory.weights + rows + memory.activations(32, 110, rows=2)
    walk.run()
    reasons = Counter(r.finish_reason for r in walk.here.values())
    assert reasons["length"] > 3
    assert reasons["error"] > 0
    assert len(walk.did) > 3
