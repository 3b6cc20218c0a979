"""The server's table of models, one in memory at a time. A model is loaded by the first request that names it, and unloaded for another
model or when idle. Names with the same `make` function share one engine; a name that is also an adapter's selects this adapter.

A request uses a model from before its prompt is rendered until its last event. The model is not unloaded meanwhile. Requests for another
model wait in order, so that neither model starves.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxspec import __version__
from mlxspec.config import MAX_CONTEXT, SamplingParams
from mlxspec.engine.measured import measured
from mlxspec.engine.prefix.disk import DiskStats
from mlxspec.engine.thread import JobThread
from mlxspec.engine.worker import STOP_SECONDS, Load, Worker
from mlxspec.errors import EngineStoppedError
from mlxspec.loading.pooling import Pooling
from mlxspec.server.completions_api import form_of
from mlxspec.server.errors import ApiError
from mlxspec.server.prompt import format_of

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_LOOKS_EVERY = 0.5
_END_SECONDS, _JOIN_SECONDS = 1.2, 0.3  # in which the engine ends with the server, and its thread behind that


@dataclass(frozen=True)
class Loaded:
    """A model in memory. engine: to read what never changes, like tokenizer and limits. params: the sampling of requests that set none;
    None for that of the server's config."""

    name: str
    worker: Worker
    engine: Engine  # for what never changes: tokenizer, spec, limits
    params: SamplingParams | None = None  # where a request says nothing; None: as the server's config has it

    @property
    def fingerprint(self) -> str:
        """Return OpenAI's `system_fingerprint`. It differs where the same seed may give another text."""
        model = self.engine.model
        made_of = f"{__version__} {self.name} {self.engine.spec} {model.vocab_size} {self.engine.max_context}"
        return f"mlxspec-{__version__}-{zlib.crc32(made_of.encode()):08x}"


@dataclass(frozen=True, kw_only=True)
class Known:
    """The facts about a model that has been loaded at least once, which stay known after its weights have left memory.

    facts: context, vocabulary, drafters, measurements of `mlxspec try`, and `capabilities` in the words of Ollama's API. path: the
    model's files; params: the sampling of requests that set none, None for that of the server's config; template: the source of the chat
    template; special: special tokens by their roles; adapters: their names; refused: adapters that cannot be used, each with the reason.
    """

    facts: Mapping[str, Any]
    path: str
    params: SamplingParams | None
    template: str | None
    special: Mapping[str, str] | None
    adapters: tuple[str, ...]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, engine: Engine, params: SamplingParams | None, *, answers: bool) -> Known:
        """Return the facts about the model of an engine. answers: False where it serves embeddings and ranks only."""
        form, tokenizer = format_of(engine), engine.tokenizer
        can = {
            "completion": answers,
            "insert": form_of(engine) is not None,
            "vision": engine.vision is not None,
            "tools": form.takes_tools,
            "thinking": form.thinking is not None,
            "embedding": isinstance(engine.pooling, Pooling),
        }
        facts = {
            "n_ctx": engine.max_context,
            "n_vocab": engine.model.vocab_size,
            "drafters": ["suffix", *engine.drafts.drafters],
            "draft": list(engine.spec.drafters),
            "policy": engine.spec.policy,
            "computed_in": engine.dtype_reason,
            "max_rows": engine.config.max_rows,
            "defaults": {}
            if params is None
            else {
                name: value
                for name in ("temperature", "top_p", "max_tokens")
                if (value := getattr(params, name)) != MAX_CONTEXT
            },
            "capabilities": [word for word, holds in can.items() if holds],
            "measured": measured(engine.name),
        }
        template = None if tokenizer is None or tokenizer.template is None else tokenizer.template.source
        return cls(
            facts=facts,
            path=engine.name,
            params=params,
            template=template,
            special=None if tokenizer is None else dict(tokenizer.special),
            adapters=tuple(engine.adapters),
            refused=dict(engine.refused_adapters),
        )


class Models:
    """The table of the models that a server serves, one in memory at a time. makers: the function that makes a model's engine, by name;
    the first is the default model. sampling: returns the sampling of requests to a model that set none; called once the model's files
    are on this machine. Used in one event loop."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Engine]],
        *,
        idle_seconds: float | None = None,
        sampling: Callable[[str], SamplingParams] | None = None,
        beside: Mapping[str, Callable[[], Engine]] | None = None,
        strict: bool = False,
    ) -> None:
        """Make the table; loads nothing. idle_seconds: the time without a request after which the model is unloaded; None for never.
        strict: refuse an unknown name even where one model is served. beside: functions that make engines for embeddings and ranks
        only, by name; these are made before the first model, and stay in memory in addition to it."""
        self._makers = dict(makers)
        self._beside_makers, self._beside = dict(beside or {}), dict[str, "Engine"]()
        self._sampling = sampling
        self._takes_any_name = len(self._makers) == 1 and not strict
        self._params: dict[str, SamplingParams] = {}
        self._idle = idle_seconds
        self._turn = asyncio.Condition()
        self._queue: list[object] = []  # who waits, in order
        self._users = 0
        self._leaving: asyncio.Task[None] | None = (
            None  # of a request to unload; the loop alone would let go of it
        )
        self._name: str | None = None
        self._worker: Worker | None = None
        self._thread = JobThread()  # one for all loads
        self._loading: asyncio.Future[Engine] | None = None
        self._last_use = time.monotonic()
        self._is_stopping = False
        self.num_loads = 0
        self._known: dict[str, Known] = {}  # of models that have been loaded
        self.created = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._makers)

    def add(self, name: str, make: Callable[[], Engine]) -> None:
        """Add a model that requests may name. make: makes its engine. A name that exists keeps its own function."""
        self._makers = {**self._makers, name: self._makers.get(name, make)}  # a new table: threads read it

    @property
    def listed(self) -> tuple[str, ...]:
        """Return the names of all models, those for embeddings and ranks included."""
        return (*self._makers, *self._beside_makers)

    def beside(self, name: str) -> Engine | None:
        """Return the engine of this name that is held for embeddings and ranks only; None where there is none."""
        return self._beside.get(name)

    def for_vectors(self, asked: str | None) -> tuple[str, str]:
        """Return the name of the model that makes the vectors of a request, and of the model in whose worker it runs, between that
        model's rounds. asked: the request's model; where a model for vectors is served, an unknown name means that model. Raises
        ApiError."""
        there = tuple(self._beside_makers)
        if asked in self._makers or not there:
            name = self.resolve(asked)
            return name, name
        if asked not in there and asked is not None and len(there) > 1:
            raise self.unknown(asked)
        return (there[0] if asked is None or asked not in there else asked), self._name or self.names[0]

    @property
    def worker(self) -> Worker | None:
        """Return the worker of the model that is in memory or is being loaded; None where there is none."""
        return self._worker

    @property
    def state(self) -> str:
        """Return the state of the server: `loading`, `ready`, `failed`, `stopping`, or `unloaded`, in which the next request loads a
        model."""
        if self._is_stopping:
            return "stopping"
        return "unloaded" if self._worker is None else self._worker.state

    def resolve(self, asked: str | None) -> str:
        """Return the name of the model that a request means. asked: the request's model; None for the default. Where the server was
        started with one model, an unknown name means that model, unless names are strict. Raises ApiError."""
        if asked in self._beside_makers:
            raise ApiError(f"{asked} is there for embeddings and ranks alone.", param="model")
        if asked in self._makers:
            return asked
        if asked is None or self._takes_any_name:
            return self.names[0]
        raise self.unknown(asked)

    def unknown(self, asked: str) -> ApiError:
        """Return the error for a name that no model has."""
        said = f"There is no model {asked[:100]!r} here; there are: {', '.join(self.listed)}."
        return ApiError(said, status=404, param="model", code="model_not_found")

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Loaded]:
        """Return a context whose value is the loaded model; the model stays in memory until the context ends. Waits for its turn where
        another model is in use. Raises the errors of loading, and EngineStoppedError."""
        loading = await self._take(name)
        try:
            engine = await asyncio.shield(loading)
            if self._worker is None:
                raise EngineStoppedError("The engine is being stopped.")
            yield Loaded(name, self._worker, engine, self._params.get(name))
        finally:
            self._users -= 1
            self._last_use = time.monotonic()
            async with self._turn:
                self._turn.notify_all()

    def _shares(self, name: str) -> bool:
        """Return whether the engine that is in memory or is being loaded is the one of this name."""
        return self._name is not None and self._makers.get(name) is self._makers[self._name]

    async def _take(self, name: str) -> asyncio.Future[Engine]:
        ticket = object()
        async with self._turn:
            self._queue.append(ticket)
            try:
                await self._turn.wait_for(
                    lambda: (
                        self._is_stopping
                        or (self._queue[0] is ticket and (self._shares(name) or self._users == 0))
                    )
                )
                if self._is_stopping:
                    raise EngineStoppedError("The server is being stopped.")
                if not self._shares(name) or self._loading is None or self._is_broken:
                    await self._unload()
                    self._load(name)
                self._users += 1
                if self._loading is None:
                    raise EngineStoppedError("The model is not being loaded.")
                return self._loading
            finally:
                self._queue.remove(ticket)
                self._turn.notify_all()

    @property
    def _is_broken(self) -> bool:
        """Return whether the engine in memory has ended and must be loaded anew. False while a request still uses it."""
        return self._users == 0 and self._worker is not None and self._worker.state in ("failed", "stopped")

    def _load(self, name: str) -> None:
        make = self._makers[name]
        worker = Worker(lambda: self._made(make), thread=self._thread)
        self._worker, self._name = worker, name
        self.num_loads += 1

        def ready() -> Engine:
            engine = worker.wait_ready()
            if self._sampling is not None:
                self._params |= {n: self._sampling(n) for n, m in self._makers.items() if m is make}
            return engine

        self._loading = asyncio.ensure_future(asyncio.to_thread(ready))

        def note(done: asyncio.Future[Engine]) -> None:
            """Record the facts of the models whose engine has been loaded. Retrieving the exception of a failed load keeps asyncio from
            logging it."""
            for other in self._makers if not done.cancelled() and done.exception() is None else ():
                self.known(other)

        self._loading.add_done_callback(note)

    def _made(self, make: Callable[[], Engine]) -> Engine:
        """Return the engine that `make` makes, after the engines for embeddings and ranks have been made. Called in the engines' thread."""
        for other, make_other in self._beside_makers.items():
            if other not in self._beside:
                self._beside[other] = make_other()
        engine = make()
        engine.memory.hold(sum(other.memory.weights for other in self._beside.values()))
        return engine

    async def _unload(self) -> None:
        worker, self._worker, self._name, self._loading = self._worker, None, None, None
        if worker is not None:
            await asyncio.to_thread(worker.stop, STOP_SECONDS)

    def known(self, name: str) -> Known | None:
        """Return the facts about a model; None for one that has never been loaded. Loads nothing."""
        engine = self._beside[name] if name in self._beside else self._engine(name)
        if engine is not None and name not in self._known:
            self._known[name] = Known.of(engine, self._params.get(name), answers=name not in self._beside)
        return self._known.get(name)

    def facts(self, name: str) -> dict[str, Any]:
        """Return `Known.facts` of a model; empty for one that has never been loaded."""
        known = self.known(name)
        return {} if known is None else dict(known.facts)

    def meta(self, name: str) -> dict[str, Any]:
        """Return the facts about a model, and in `loaded` whether it is in memory."""
        return {"loaded": name in self._beside or self._engine(name) is not None, **self.facts(name)}

    def loaded_facts(self) -> dict[str, Any]:
        """Return the facts about the model in memory; empty while there is none."""
        name = self._name
        return {} if name is None or self._engine(name) is None else self.facts(name)

    def _engine(self, name: str) -> Engine | None:
        loading = self._loading
        if not self._shares(name) or loading is None or not loading.done() or loading.cancelled():
            return None
        return None if loading.exception() is not None else loading.result()

    def gauges(self) -> dict[str, float]:
        """Return the current values of the gauges of /metrics, by name. Does not wait for the engine."""
        worker, load = self._worker, self.load
        disk = load.disk or DiskStats()
        return {
            "open_requests": 0 if worker is None else worker.num_open,
            "rows_running": load.num_running,
            "rows_waiting": load.num_waiting,
            "state_bytes": load.num_bytes,
            "prefix_bytes": load.prefix_bytes,
            "memory_bytes": load.memory_bytes,
            "prefix_disk_bytes": load.disk_bytes,
            "prefix_disk_read_bytes_total": disk.bytes_read,
            "prefix_disk_written_bytes_total": disk.bytes_written,
            "prefix_disk_lost_total": disk.num_lost,
            "prefix_disk_failed_total": disk.num_failed + disk.num_missed,
            "past_texts_failed_total": load.texts_failed,
            "stores_off": len(load.stores_off),
            "exact_width": load.exact_width or 0,
            "model_loads_total": self.num_loads,
            "ready": float(self.state == "ready"),
        }

    @property
    def load(self) -> Load:
        """Return the load of the engine in memory; an empty one where there is none."""
        return Load() if self._worker is None else self._worker.load

    def unload(self, name: str) -> asyncio.Task[None]:
        """Start a task that unloads a model, and return the task. A model that is answering, or that requests wait for, stays in memory.
        The task goes on if its caller is cancelled."""

        async def leave() -> None:
            async with self._turn:
                if self._shares(name) and self._users == 0 and not self._queue:
                    await self._unload()

        self._leaving = asyncio.create_task(leave())
        return self._leaving

    async def unload_when_idle(self) -> None:
        """Unload the model each time no request has used it for the table's `idle_seconds`, until the server stops. Returns at once if
        idle_seconds is None."""
        while self._idle is not None and not self._is_stopping:
            await asyncio.sleep(min(_LOOKS_EVERY, self._idle / 2))
            async with self._turn:
                rests = self._users == 0 and not self._queue and self._worker is not None
                if rests and time.monotonic() - self._last_use >= self._idle:
                    await self._unload()

    async def stop(self) -> bool:
        """End every request and the engine. Returns whether the engine's thread has ended within two seconds."""
        self._is_stopping = True
        worker = self._worker
        ended = worker is None or await asyncio.to_thread(worker.stop, _END_SECONDS)
        self._thread.run(self._beside.clear)  # their arrays belong to that thread
        self._thread.close()
        ended = ended and await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        async with self._turn:
            self._turn.notify_all()
        return ended
