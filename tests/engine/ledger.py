"""A walk over all that engines keep books of: queue, places, memory, prefix cache in memory and on disk, streams, locks.

A walk is three lives on one folder: workers one after the other, of which the second has another model. In each life random requests are
submitted, read by tasks of an event loop or left unread, closed and late; prefix caches are evicted, the disk falls behind, calls that
wait or compute fail or are interrupted. The worker runs in the test's own thread, and between any two steps of its engine the walk takes
a turn: it looks at the books and does what comes next. A seed decides all of it.

What holds after each step: bytes that are reserved are those of requests that are here, budgets hold, shares differ by one at most, each
request is here or has ended with one event, no lock is held. At the end of a life nothing is left. Texts are those of plain decoding.
"""

from __future__ import annotations

import asyncio
import fcntl
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import MAX_CONTEXT, EngineConfig, SamplingParams
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import engine as engines
from mlxspec.engine import kept_files, memory
from mlxspec.engine import request as requests
from mlxspec.engine import worker as workers
from mlxspec.engine.engine import Engine
from mlxspec.engine.places import Rows
from mlxspec.engine.prefix.disk import Fetch
from mlxspec.engine.prefix.rows import Prefix
from mlxspec.engine.prefix.tree import PrefixTree
from mlxspec.engine.request import Request
from mlxspec.engine.schedule import TURN
from mlxspec.engine.stream import Stream
from mlxspec.engine.thread import JobThread
from mlxspec.engine.worker import Worker
from mlxspec.errors import QueueFullError
from mlxspec.events import Event, FinishEvent, TokensEvent
from mlxspec.models.base import Model
from tests import tiny_models
from tests.engine import equality

ROWS, CHUNK, CONTEXT, NEAR = 3, 32, 128, 8
TURNS, MOST = 50, 400  # with acts in a life, and until it ends
DRAFTED = 13  # tokens of the widest round
STORE, FILES = 300_000, 1_500_000  # bytes in memory and on disk: a few states
WAITS = 4  # steps until what can go on does: a round that is on its way is read first
CLIENTS = "abcdef"
STEMS = [np.random.default_rng(i).integers(1, 90, 90).tolist() for i in range(3)]
# What a step waits for or computes with: each may fail, or be interrupted; some of them within the call that stands behind.
PLACES: tuple[tuple[Any, ...], ...] = (
    (mx, "eval"),
    *2 * ((mx, "eval", Rows, "park"),),
    *2 * ((ModelCache, "restore", Rows, "unpark"),),
    (mx, "async_eval"),
    *2 * ((Prefix, "fetch", Engine, "_begin"),),
    (ModelCache, "begin"),
    (ModelCache, "commit"),
    (ModelCache, "snapshot"),
    (ModelCache, "restore"),
    (PrefixTree, "put"),
    (PrefixTree, "find"),
    (Fetch, "hit"),
    (Mtp, "draft"),
    (Mtp, "hear"),
)
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: RuntimeError("[malloc] Unable to allocate"),
    MemoryError,
    KeyboardInterrupt,
)
EXPECTED = ("allocate", "MemoryError", "KeyboardInterrupt", "seconds were not enough", "requests are waiting")
MODELS: dict[str, Callable[[], Model]] = {
    "first": tiny_models.target,
    "weights": lambda: tiny_models.stack("hybrid", 7),
    "settings": cache(lambda: tiny_models.make(replace(tiny_models.config(), rope_theta=20.0))),
}
_texts: dict[tuple[str, tuple[int, ...]], list[int]] = {}


def _decode(name: str, wanted: Mapping[tuple[int, ...], int], *, alone: bool = False) -> None:
    """Decode each prompt of `wanted` plainly, for its number of tokens, and keep the texts in _texts. name: of the model. alone: whether a
    text that is kept is decoded again, as it was decoded beside others, which rounds otherwise."""
    made = Engine(MODELS[name](), config=EngineConfig(prefix_budget=0, max_rows=16))
    asked = [
        made.submit(list(prompt), SamplingParams(max_tokens=num, ignore_eos=True))
        for prompt, num in wanted.items()
        if num and (alone or len(_texts.get((name, prompt), ())) < num)
    ]
    while not made.is_idle:
        made.step()
    _texts.update({(name, tuple(r.prompt)): list(r.history[len(r.prompt) :]) for r in asked})


class OwnThread:
    """The test's own thread in the place of a worker's: it keeps the job, which the walk runs."""

    is_current = True

    def run(self, job: Callable[[], None]) -> threading.Event:
        self.job = job
        return threading.Event()

    def close(self) -> None: ...

    def join(self, timeout: float | None = None) -> bool:
        return True


class Files(JobThread):
    """The thread for files. Its jobs wait until the walk lets them run."""

    def hold(self) -> None:
        go = self._go = threading.Event()

        def wait() -> None:
            assert self.is_current, "files are looked at in the engine's thread"
            go.wait()

        self.run(wait, is_urgent=True)

    def work_off(self) -> None:
        self._go.set()
        assert self.run(lambda: None).wait(60.0)


def locks(root: object) -> list[object]:
    """Return the locks of an object and of all objects of mlxspec.engine that can be reached from it."""
    found, seen, waiting = list[object](), set[int](), [root]
    while waiting:
        at = waiting.pop()
        kind = type(at).__module__
        if kind in ("_thread", "threading") and "lock" in repr(at).lower():
            found.append(at)
        elif isinstance(at, dict | list | tuple | set):
            waiting += at.values() if isinstance(at, dict) else at
        elif kind.startswith("mlxspec.") and ".models." not in kind and id(at) not in seen:
            seen.add(id(at))
            waiting += vars(at).values() if hasattr(at, "__dict__") else ()
    return found


@dataclass(eq=False)
class Asked:
    """A request of the walk. told: tokens that the engine has returned; got: events that its reader has read; is_read: whether there is
    a reader now; lost: turns in which it is not in the engine and its stream has no end; behind: tokens told in each turn since its
    reader is behind; is_cut: its last step was interrupted; is_off: the disk took nothing when it ended."""

    stream: Stream
    prompt: list[int]
    owner: str
    most_unread: int | None
    told: list[int] = field(default_factory=list)
    got: list[Event] = field(default_factory=list)
    is_read: bool = True
    num_ends: int = 0
    is_off: bool = False
    lost: int = 0
    behind: list[int] = field(default_factory=list)
    is_refused: bool = False
    is_cut: bool = False
    reader: asyncio.Task[None] | None = None

    @property
    def request(self) -> Request | None:
        return self.stream.request

    @property
    def is_over(self) -> bool:
        return self.request is not None and self.request.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.got if isinstance(e, TokensEvent) for t in e.tokens]

    async def read(self) -> None:
        try:
            async for event in self.stream:
                self.got.append(event)
        except QueueFullError:
            self.is_refused = True


class Armed:
    """A call that fails once: the one behind the next `left` calls, in one of the next steps. within: the owner and the name of the call in
    which it does."""

    def __init__(self, error: BaseException, left: int, owner: Any, name: str, *within: Any) -> None:
        self.error, self.left, self.owner, self.name, self.within = error, left, owner, name, within
        self.steps = 8

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        right, outer = getattr(self.owner, self.name), getattr(*self.within) if self.within else None

        def fails(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise self.error
            return right(*args, **kwargs)

        def enters(*args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(self.owner, self.name, fails)
                return outer(*args, **kwargs)  # type: ignore[misc]

        if self.within:
            self.left = min(self.left, 0)
            patch.setattr(*self.within, enters)
        else:
            patch.setattr(self.owner, self.name, fails)

    @property
    def is_over(self) -> bool:
        self.steps -= 1
        return self.left < 0 or not self.steps


@dataclass
class Walk:
    """A walk through three lives of a worker on one folder.

    kind: what the second life's model has of its own, weights or settings. is_tight: whether memory is short, so that requests wait for
    it and not for a place. did: what was done,
    failed and was found, by name. late: number of steps in which a request that could go on did not.
    """

    folder: Path
    seed: int
    monkeypatch: pytest.MonkeyPatch
    kind: str
    is_tight: bool
    did: Counter[str] = field(default_factory=Counter)
    asked: list[Asked] = field(default_factory=list)
    known: defaultdict[str, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    most: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        self.rng, self.loop = random.Random(self.seed), asyncio.new_event_loop()
        self.monkeypatch.setattr(workers, "rehearse", lambda engine: iter(()))
        self.monkeypatch.setattr(workers, "_OBEYS_FOR", 60.0)  # no clock decides
        self.monkeypatch.setattr(engines, "JobThread", self._thread)
        for module in (memory, requests):
            self.monkeypatch.setattr(module, "STEP", 32)
        try:
            for name, num_clients in (("first", 3), (self.kind, 6), ("first", 4)):
                self.model, self.clients = name, CLIENTS[:num_clients]
                self.asked, self.late = [], Counter[str]()
                self.waiting, self.running = list[Request](), list[Request]()
                self.steps, self.is_cut, self.may_fail, self.armed = 0, False, True, None
                self.live()
                self.damage()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(_ticks())
            self.loop.close()

    def _thread(self, name: str) -> JobThread:
        self.files = Files(name)
        return self.files

    def live(self) -> None:
        own = OwnThread()
        self.worker = Worker(self.make, thread=own)  # type: ignore[arg-type]
        self.turned = self.worker.call(self.turn, is_piece=True)
        own.job()
        assert self.worker.state == "stopped", "the engine broke"
        self.turned.result(0)
        self.did["bytes from the disk"] += self.disk.stats.bytes_read
        self.did["files that were damaged"] += self.disk.stats.num_missed
        self._check_answers()

    def make(self) -> Engine:
        model = MODELS[self.model]()
        head = Mtp(tiny_models.make_mtp(tiny_models.config(), model), model.max_context)
        made = equality.engine(
            ["ngram-simple", head],
            model=model,
            max_rows=ROWS,
            prefill_chunk=CHUNK,
            max_waiting=6,
            max_context=CONTEXT,
            prefix_budget=STORE,
            prefix_disk=FILES,
            prefix_dir=self.folder,
        )
        made.prefix.near = NEAR
        if self.is_tight:
            rows = 2 * (made.memory.row(CONTEXT, made.spec) + 10_000)
            made.memory.budget = made.memory.weights + rows + made.memory.activations(CHUNK, CONTEXT, rows=2)
        assert made.prefix.disk is not None
        self.disk, step = made.prefix.disk, made.step
        made.step = lambda: self.watched(made, step)  # type: ignore[method-assign]
        self.locks = [*locks(self.worker), *locks(made)]
        self.script = self._script(made, has_end=self.model == "first")
        self.files.hold()
        return made

    # --- acts

    def submit(self) -> None:
        owner, client = self.rng.choice("xy"), self.rng.choice(self.clients + "aaa")
        prompt = [*self.rng.choice(STEMS)[: self.rng.choice((2, 20, 50, 90))], self.rng.randint(1, 4)]
        self._submit(prompt, owner, client)

    def _submit(self, prompt: list[int], owner: str, client: str) -> Asked:
        # rounds of MTP heads alone are launched behind unread ones
        kinds = ((), ("mtp",), ("ngram-simple", "mtp")) if self.model == "first" else (("mtp",),)
        drafters = self.rng.choice(kinds)
        spec = equality.spec(*drafters, owner=owner)
        most = MAX_CONTEXT if self.rng.random() < 0.1 else self.rng.randint(1, 50)
        deadline, most_unread = 1e-9 if self.rng.random() < 0.04 else None, self.rng.choice((None, 8))
        stream = self.worker.submit(
            prompt,
            SamplingParams(max_tokens=most, ignore_eos=True),
            spec=spec,
            client=client,
            deadline=deadline,
            marks=[m for m in (20, 50) if m < len(prompt)],
            most_unread=most_unread,
        )
        self.asked.append(Asked(stream, prompt, owner, most_unread))
        return self.asked[-1]

    def close(self) -> None:
        running = [a for a in self.asked if not a.stream.is_done]
        if running:
            self.rng.choice(running).stream.close()
            self.did["closed"] += 1

    def stop_reading(self) -> None:
        for asked in self.asked:
            if asked.is_read and self.rng.random() < 0.3:
                asked.is_read = False
                if asked.reader is not None:
                    asked.reader.cancel()

    def read_again(self, share: float = 0.5) -> None:
        for asked in self.asked:
            asked.is_read |= self.rng.random() < share

    def evict(self, engine: Engine) -> None:
        engine.prefix.limit(self.rng.randrange(STORE))

    def refuse(self) -> None:
        """Let the disk take nothing more in this life."""
        self.monkeypatch.setattr(kept_files, "SPARE", 1 << 60)

    def damage(self) -> None:
        """Change files between two lives: of three, one holds other bytes, and one is under the name of another."""
        self.monkeypatch.setattr(kept_files, "SPARE", 0)
        paths = sorted(self.folder.glob("*.safetensors"))
        self.rng.shuffle(paths)
        third = len(paths) // 3
        for path in paths[:third]:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2] + self.rng.randbytes(len(data) - len(data) // 2))
        moved = paths[third : 2 * third]
        for path in moved:
            path.rename(path.with_suffix(".moved"))
        for path, name in zip(moved, [*moved[1:], *moved[:1]], strict=True):
            path.with_suffix(".moved").rename(name)

    # --- a turn

    def turn(self, engine: Engine) -> None:
        try:
            self.check(engine)
            is_over = next(self.script, self) is self
            if is_over or self.rng.random() < 0.5:
                self.files.work_off()
                self._check_folder(engine)
                if is_over:
                    self.worker.stop()
                    return
                self.files.hold()
            self.read()
        except BaseException:
            self.files.work_off()
            self.worker.stop()
            raise
        self.turned = self.worker.call(self.turn, is_piece=True)

    def _script(self, engine: Engine, *, has_end: bool) -> Iterator[None]:
        """Yield after each turn of a life. has_end: whether all requests end before the worker is stopped, and a prompt is then read
        ahead of its request."""
        acts = (*5 * [self.submit], self.close, self.stop_reading, self.read_again)
        for number in range(TURNS):
            if self.rng.random() < 0.8:
                self.rng.choice((*acts, lambda: self.evict(engine)))()
            if not has_end and number == TURNS // 3:
                self.refuse()
            yield
        if has_end:
            self.may_fail, self.armed = False, None
            yield from self._until(lambda: engine.is_idle and not self.worker.num_open)
            assert engine.nbytes == engine.memory.reserved == 0
            if not self.is_tight:
                yield from self._read_ahead(engine)

    def _until(self, holds: Callable[[], bool]) -> Iterator[None]:
        for _ in range(MOST):
            self.read_again(1.0)
            yield
            if holds():
                return
        raise AssertionError("it does not end")

    def _read_ahead(self, engine: Engine) -> Iterator[None]:
        """Check that an expected prompt is read piece by piece, once, and that its request finds it. Yields after each piece."""
        expected = [self.rng.randint(1, 89) for _ in range(3 * CHUNK)]
        spec = equality.spec("mtp", owner="x")
        self.known["x"].append(expected)
        engine.prefix.tree.clear()
        for most in (len(expected) // CHUNK + 1, 0):
            before = self.steps
            self.worker.expect(expected, spec, "a")
            yield from self._until(lambda: not self.worker.expected)
            assert self.steps - before <= most, "it is read more than once"
        asked = self._submit([*expected, 5], "x", "a")
        yield from self._until(lambda: asked.stream.is_done)
        if asked.request is not None and asked.request.error is None:
            assert asked.request.stats.num_cached == len(expected), "it is not read ahead"

    def read(self) -> None:
        """Let the readers read what is there; some are interrupted while they wait."""
        for asked in self.asked:
            if asked.is_read and (asked.reader is None or asked.reader.cancelled()):
                asked.reader = self.loop.create_task(asked.read())
        self.loop.run_until_complete(_ticks())
        for asked in self.asked:
            if asked.reader is not None and not asked.reader.done() and self.rng.random() < 0.1:
                asked.reader.cancel()
            elif asked.reader is not None and asked.reader.done() and not asked.reader.cancelled():
                asked.reader.result()
        self.loop.run_until_complete(_ticks())

    # --- a step

    def watched(self, engine: Engine, step: Callable[[], list[Event]]) -> list[Event]:
        """Run a step in which a call may fail, and return its events. After an interrupt the caller goes on, as in a notebook."""
        self.steps += 1
        was_off = self.disk.files.rests
        if self.may_fail and self.armed is None and self.rng.random() < 0.2:
            self.armed = Armed(self.rng.choice(ERRORS)(), self.rng.randrange(2), *self.rng.choice(PLACES))
        with self.monkeypatch.context() as patch:
            if self.armed is not None:
                self.armed.plant(patch)
            try:
                events = step()
                self.is_cut = False
            except BaseException as raised:
                self.is_cut = True
                if self.armed is None or raised is not self.armed.error or isinstance(raised, Exception):
                    raise
                events = []
                for asked in (
                    self.asked
                ):  # what the step had told is told by the next one: an ended stream takes no more
                    asked.is_cut |= asked.is_over and not asked.stream.is_done
        if self.armed is not None and self.armed.is_over:
            self.did[f"{self.armed.name} {type(self.armed.error).__name__}"] += self.armed.left < 0
            self.armed = None
        by_number = {a.request.number: a for a in self.asked if a.request is not None}
        for event in events:
            asked = by_number.get(event.request)
            if asked is not None and isinstance(event, TokensEvent):
                asked.told += event.tokens
            if asked is not None and asked.request is not None and isinstance(event, FinishEvent):
                asked.num_ends += 1
                asked.is_off = was_off and event.reason == "length"
        return events

    # --- the books

    def check(self, engine: Engine) -> None:
        places, held = engine.places, engine.memory
        live = {r.number: r for r in places.requests}
        for asked in self.asked:
            if (request := asked.request) is not None:
                is_over = request.finish_reason is not None
                asked.lost += not asked.stream.is_done and request.number not in live
                assert asked.lost < 2, "it has no end"  # what a full queue drops is told with the next step
                assert not is_over or request.number not in live or self.is_cut, request.finish_reason
                assert len(request.history) <= request.most_tokens
                if asked.most_unread is not None and not asked.stream.is_done:
                    unread = len(asked.told) - len(asked.tokens)
                    assert unread <= asked.most_unread + 2 * DRAFTED, "what nobody reads grows"
                    asked.behind = [*asked.behind, len(asked.told)] if asked.stream.is_behind else []
                    assert len({*asked.behind}) <= WAITS, "a row goes on that nobody reads"
        begun = [r for r in live.values() if r not in places.queue]
        self._check_owners([*places.queue])
        assert held.reserved == sum(map(held.needed, begun))
        longest = max((r.most_tokens for r in begun), default=0)
        running = held.activations(memory.SMALLEST_CHUNK, longest, rows=len(begun)) if begun else 0
        assert held.weights + held.reserved + running <= held.budget
        tree = engine.prefix.tree
        tree.check()
        assert tree.nbytes <= tree.budget <= STORE
        assert len(places.running) <= ROWS
        assert places.rows.nbytes >= sum(kept.nbytes for kept in places.rows.parked.values())
        assert (places.rows.cache is None) == (not places.rows)
        if not live:
            assert engine.is_idle
            assert engine.nbytes == held.reserved == 0
        ours = [*self.locks, *(lock for a in self.asked if not a.stream.is_done for lock in locks(a.stream))]
        assert not [lock for lock in ours if "<locked" in repr(lock)], "a lock is held"
        self._check_shares(engine)

    def _check_owners(self, waiting: Sequence[Request]) -> None:
        """Check that what requests found of their prompts is of their own owner's texts."""
        for asked in self.asked:
            if (request := asked.request) is not None and request not in waiting:
                known = self.known[asked.owner]
                lengths = [_shared(asked.prompt, text) for text in known if text is not request.history]
                assert request.stats.num_cached <= max(lengths, default=0), "another owner's text is found"
                if len(lengths) == len(known):
                    known.append(request.history)

    def _check_shares(self, engine: Engine) -> None:
        """Check that who may have a place has it, that no client has two places fewer than another, and that each has its turn, but for the
        steps until a round on its way has been read."""
        places = engine.places
        rests = {a.request.number for a in self.asked if a.request is not None and a.stream.is_behind}
        has = Counter(r.client for r in places.running)
        parked = [r for r in places.parked if r.number not in rests]
        waiting = parked if self.is_tight else [*parked, *places.queue]
        clients = {r.client for r in waiting}
        came = [r for r in self.waiting if r.finish_reason is not None]  # perhaps for a part of the step
        had = Counter(r.client for r in {*places.running, *self.running, *came})
        for new in {*places.running} - {*self.running}:
            older = [r for r in waiting if r in self.waiting and has[new.client] > had[r.client] + 1]
            assert not older, "a client has got a place that was another's"
        late = {
            "a place is free": len(places.running) < ROWS and any(r in self.waiting for r in waiting),
            "shares differ": any(max(has.values(), default=0) > has[client] + 1 for client in clients),
        }
        for client in CLIENTS:
            late[client] = client in clients and not has[client]
        self.late = Counter({what: self.late[what] + 1 for what, is_so in late.items() if is_so})
        self.waiting, self.running = waiting, places.running
        for what, steps in self.late.items():
            self.most[what] = max(self.most[what], steps)
            assert steps <= (3 * TURN if what in CLIENTS else WAITS), what

    def _check_folder(self, engine: Engine) -> None:
        """Check that nothing is left of a file that was being written, that nobody has the folder locked, and that the limit holds."""
        assert not [*self.folder.glob("*.new")]
        assert sum(-(-p.stat().st_size // 4096) * 4096 for p in self.folder.glob("*.safetensors")) <= FILES
        with open(self.folder / kept_files.LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _check_answers(self) -> None:
        """Check that each request has been told all of its text and one end, and found what its own owner has left."""
        self.read_again(1.0)
        self.read()
        lengths = Counter[tuple[int, ...]]()
        for asked in self.asked:
            lengths |= Counter({tuple(asked.prompt): len(asked.told)})
        _decode(self.model, lengths)
        for asked in self.asked:
            assert asked.reader is not None
            assert asked.stream.is_done
            if asked.request is None or asked.is_refused:
                continue
            request, prompt = asked.request, tuple(asked.prompt)
            ends = [e for e in asked.got if isinstance(e, FinishEvent)]
            assert len(ends) == 1 >= asked.num_ends
            assert not asked.is_off or any("disk refused" in notice for notice in request.stats.notices)
            assert asked.got[-1] is ends[0]
            self.did[f"ended by {ends[0].reason}"] += 1
            assert ends[0].reason != "error" or any(w in (ends[0].error or "") for w in EXPECTED), ends[
                0
            ].error
            said = asked.told
            if said and said != _texts[self.model, prompt][: len(said)]:
                _decode(self.model, {prompt: len(said)}, alone=True)
                assert said == _texts[self.model, prompt][: len(said)]
            assert asked.tokens == said[: len(asked.tokens)]
            if ends[0].reason == "length" and not asked.is_cut:
                assert asked.tokens == said
                is_short = requests.SHORT_OF_MEMORY in request.stats.notices
                assert is_short or len(said) == min(request.params.max_tokens, CONTEXT - len(asked.prompt))
                assert self.is_tight or not is_short


async def _ticks() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
