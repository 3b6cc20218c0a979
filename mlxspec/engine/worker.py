"""One thread that owns an engine, and the only one that uses MLX: it makes the engine, steps it, and releases it.

Other threads use the worker's methods: `submit` returns a Stream (stream.py) of the request's events, `call` runs a function on the engine
between two rounds. Both may be used from any thread and from event loops; neither waits for the engine.

    loading -> ready -> stopped        `stop`, or leaving `with`
       |         `----> failed         the engine broke: open streams end with the sentence, new ones are refused with it
       `--------------> failed         it could not be made

An error of one request ends that request, and the thread goes on. While there is no request the thread works ahead: it reads the prompts
that clients are expected to send (read_ahead.py), and until the first request arrives, and for a moment after each answer, it rehearses
(rehearsal.py), which compiles what answers would wait for. A request that arrives waits for one piece of this work at most.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Literal, TypeVar

import mlx.core as mx

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Prompt
from mlxspec.engine.prefix.disk import DiskStats
from mlxspec.engine.read_ahead import read_ahead
from mlxspec.engine.rehearsal import IDLE_SECONDS, rehearse
from mlxspec.engine.stream import Stream
from mlxspec.engine.thread import JobThread
from mlxspec.errors import ConfigError, EngineStoppedError, MlxspecError, RankError
from mlxspec.events import Event, FinishEvent, FinishReason
from mlxspec.platform import device
from mlxspec.sampling.constraints import Compiled

T = TypeVar("T")
Expected = tuple[Sequence[int], SpecConfig, Mapping[str, float]]  # as `read_ahead` takes them
_Command = Callable[[Engine | None], None]  # receives None where no engine will ever run it
State = Literal["loading", "ready", "stopped", "failed"]
STOP_SECONDS = 5.0
_OBEYS_FOR = 0.05  # seconds in which commands are obeyed between two rounds: rows do not wait for a hundred new requests
_FLUSH_SECONDS = 0.8  # at the end, in which what waits for the disk is written
_DISK_SECONDS = 0.005  # seconds between two checks whether the disk takes more
_RESTS_FOR = 0.02  # seconds between two checks whether clients read, where all requests are paused
_MOST_EXPECTED = 8  # clients whose next prompts are read ahead
_NOTES_EVERY = 0.5  # seconds between two times that a busy engine's load is noted


@dataclass(frozen=True)
class Load:
    """The load of an engine, as the worker last noted it. num_running: rows that are read or decode. num_waiting: requests that wait.
    num_bytes: of all rows' state. prefix_bytes: of the prefix cache in memory. memory_bytes: of all arrays of the process, including
    weights and the two before. disk_bytes: of the prefix cache on disk; disk: its counts, None where there is none. texts_failed:
    earlier texts that the disk refused. stores_off: sentences on the stores that are not written at the moment. exact_width: as
    `Engine.exact_width`."""

    num_running: int = 0
    num_waiting: int = 0
    num_bytes: int = 0
    prefix_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    disk: DiskStats | None = None
    texts_failed: int = 0
    stores_off: tuple[str, ...] = ()
    exact_width: int | None = None


class Worker:
    """The owner of an engine and of the thread that runs it. `make` is called in this thread, which starts at once, and returns the
    engine.

        with Worker(lambda: load("demo")) as worker:
            for event in worker.submit("def main():", SamplingParams(max_tokens=32)):
                ...

    An engine must be made in the thread that steps it, so give a function that makes it, not an engine.
    """

    def __init__(self, make: Callable[[], Engine], *, thread: JobThread | None = None) -> None:
        """Start to make the engine. thread: where the worker runs, after the jobs that are queued there; None: in a thread of its own,
        which ends with the worker. Raises ConfigError where `make` cannot be called."""
        if not callable(make):
            raise ConfigError(
                "Worker takes a function that makes an engine, as in Worker(lambda: mlxspec.load('demo'))."
            )
        self._make = make
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._pieces: deque[_Command] = deque()  # of long work; at most one runs between two rounds
        self._open: set[Stream] = set()  # submitted and not ended
        self._state: State = "loading"
        self._why: BaseException | None = None
        self._engine: Engine | None = None
        self.expected: dict[str, Expected] = {}  # prompts that are read ahead, by client, the oldest first
        self._ahead: Generator[None] | None = None  # work that is on its way: its request is in the engine
        self._reads: tuple[str, Expected] | None = None  # what of `expected` that work reads
        self._rehearses_until: float | None = inf  # monotonic seconds; None: nothing is left to be rehearsed
        self._noted_at = 0.0
        self.load = Load()  # replaced whole, so that any thread may read it
        self._thread = thread or JobThread()
        atexit.register(self._exit)
        self._ended = self._thread.run(self._run)
        self._owns_thread = thread is None
        if self._owns_thread:
            self._thread.close()

    # --- for other threads

    @property
    def state(self) -> State:
        return self._state

    @property
    def num_open(self) -> int:
        """Return the number of submitted requests whose streams have not ended."""
        return len(self._open)

    def wait_ready(self, timeout: float | None = None) -> Engine:
        """Wait until the engine is loaded, and return it. Raises the exception of `make`, EngineStoppedError after the engine's end, and
        TimeoutError after `timeout` seconds.

        Other threads may use only what never changes of the engine: tokenizer, name, spec, config, max_context, chat_prompt.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._state != "loading", timeout):
                raise TimeoutError("The model is not loaded yet.")
            if self._engine is None or self._state != "ready":
                raise self._refusal()
            return self._engine

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        marks: Iterable[int] | None = None,
        deadline: float | None = None,
        compiled: Compiled | None = None,
        client: str = "",
        most_unread: int | None = None,
    ) -> Stream:
        """Queue a request and return the stream of its events at once; the stream raises the errors of an invalid request. Arguments are
        those of Engine.submit.

        deadline: seconds from when the engine takes the request. most_unread: tokens that may wait to be read before the row pauses;
        None: any number. Raises EngineStoppedError where no engine runs or is being loaded.
        """
        stream = Stream(self.cancel, most_unread)

        def begin(engine: Engine | None) -> None:
            if engine is None or stream.is_done:
                return
            try:
                request = engine.submit(
                    prompt,
                    params,
                    spec=spec,
                    marks=marks,
                    deadline=deadline,
                    compiled=compiled,
                    client=client,
                )
            except Exception as error:
                stream.refuse(error)
                self._forget(stream)
            else:
                stream.accept(request)

        with self._changed:
            self._ask(begin)
            self._open.add(stream)
            self.expected.pop(client, None)
        return stream

    def expect(
        self,
        prompt: Sequence[int],
        spec: SpecConfig,
        client: str = "",
        *,
        adapters: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Read a prompt into the prefix cache while there is no request. It replaces the prompt that was expected of this client before.
        The client's next request ends the expectation, and so does an empty prompt. spec: of the expected request. Does nothing where
        no engine runs."""
        with self._changed:
            self.expected.pop(client, None)
            if self._state == "ready" and prompt:
                self.expected[client] = prompt, spec, adapters
            while len(self.expected) > _MOST_EXPECTED:
                del self.expected[next(iter(self.expected))]
            self._changed.notify_all()

    def cancel(self, stream: Stream) -> None:
        """End the request of a stream at any stage: the stream ends at once, the row is removed before the next round."""
        request = stream.request
        stream.put(_finish(-1 if request is None else request.number, "cancelled", None))
        self._forget(stream)

        def leave(engine: Engine | None) -> None:
            if engine is not None and stream.request is not None:
                engine.cancel(stream.request.number)

        with suppress(EngineStoppedError):
            self._ask(leave)

    def call(self, work: Callable[[Engine], T], *, is_piece: bool = False) -> Future[T]:
        """Run `work` on the engine's thread between two rounds, and return the future of its result. The future raises what `work`
        raises. `work` must not keep the engine. is_piece: whether it is one piece of long work; at most one such piece runs between
        two rounds.

        Raises EngineStoppedError where no engine runs or is being loaded.
        """
        future: Future[T] = Future()

        def begin(engine: Engine | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise EngineStoppedError(str(self._refusal()))
                result = work(engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._ask(begin, is_piece=is_piece)
        return future

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """End all streams, then the engine after the step that it is running. Return whether the engine ended within `timeout` seconds.
        One that has not ended does not delay the exit of the process."""
        self._end("stopped", EngineStoppedError("The engine is being stopped."))
        if self._thread.is_current:
            return False
        until = time.monotonic() + timeout
        if not self._ended.wait(timeout):
            return False
        return not self._owns_thread or self._thread.join(max(0.0, until - time.monotonic()))

    def fail(self, why: BaseException) -> None:
        """Stop the worker because of an error: open streams end with its sentence, and new requests are refused with it."""
        self._end("failed", why)

    def _exit(self) -> None:
        """Stop the engine at the end of the process where no caller has, because MLX aborts if a thread is still at work. A model that
        is being loaded cannot be stopped."""
        if self._state == "ready":
            self.stop()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _refusal(self) -> BaseException:
        return self._why or EngineStoppedError("The engine is not running.")

    def _ask(self, command: _Command, *, is_piece: bool = False) -> None:
        with self._changed:
            if self._state in ("stopped", "failed"):
                raise EngineStoppedError(str(self._refusal()))
            (self._pieces if is_piece else self._commands).append(command)
            self._changed.notify_all()

    def _forget(self, stream: Stream) -> None:
        with self._changed:
            self._open.discard(stream)

    # --- the thread

    def _run(self) -> None:
        if self._state != "loading":  # stopped before the thread reached it
            return
        try:
            engine = self._make()
        except BaseException as error:
            self._end("failed", error)
            return
        with self._changed:
            if self._state == "loading":
                self._engine, self._state = engine, "ready"
            self._changed.notify_all()
        try:
            self._note_load(engine)
            while self._obey(engine):
                if self._ahead is None and self._must_step(engine):
                    self._step(engine)
                    if engine.is_idle:
                        self._rehearses_until = time.monotonic() + IDLE_SECONDS
                elif self.expected or self._rehearses_until is not None:
                    self._work_ahead(engine)
                else:
                    engine.prefix.work()
                    engine.texts.work()
                self._note_load(engine)
        except RankError as error:
            self._end("failed", error)
        except BaseException as error:
            self._end("failed", EngineStoppedError(f"The engine broke: {_described(error)}."))
        finally:
            self._engine = self._ahead = None
            with suppress(Exception):
                engine.write_out(_FLUSH_SECONDS)
            with suppress(Exception):
                engine.dismiss()
            self.load = Load()
            del engine
            device.give_back()

    def _obey(self, engine: Engine) -> bool:
        """Wait for commands, requests or other work, and run commands for a limited time; return False where the worker must end."""
        with self._changed:
            if self._rehearses_until is None:
                self._changed.wait_for(
                    lambda: (
                        self._commands
                        or self._pieces
                        or (self.expected and engine.is_idle)
                        or self._state != "ready"
                        or not (engine.is_idle or engine.is_resting)
                        or engine.prefix.can_work
                        or engine.texts.has_work
                    ),
                    _DISK_SECONDS if engine.prefix.has_work else _RESTS_FOR if engine.is_resting else None,
                )
            if self._state != "ready":
                return False
            is_wanted = bool(self._commands or self._pieces)
            is_wanted |= self._is_outdated()
        if is_wanted:
            self._end_ahead()
        started = time.monotonic()
        while time.monotonic() - started < _OBEYS_FOR:
            with self._changed:
                if not self._commands:
                    break
                command = self._commands.popleft()
            command(engine)
        with self._changed:
            piece = self._pieces.popleft() if self._pieces else None
        if piece is not None:
            piece(engine)
        return True

    def _must_step(self, engine: Engine) -> bool:
        """Return whether a request is in the engine, or has ended between two steps and its stream has no end yet."""
        with self._changed:
            return not engine.is_idle or any(stream.request is not None for stream in self._open)

    def _work_ahead(self, engine: Engine) -> None:
        """Run one piece of the work for later requests: expected prompts first, then the rehearsal. An error ends this work; the
        requests that it was for will raise the same error."""
        if self._ahead is None:
            with self._changed:
                self._reads = next(iter(self.expected.items()), None)
            self._ahead = rehearse(engine) if self._reads is None else read_ahead(engine, *self._reads[1])
        until, reads = self._rehearses_until or inf, self._reads
        try:
            is_over = next(self._ahead, self) is self or (reads is None and time.monotonic() > until)
        except RankError:
            raise
        except Exception:
            is_over = True
        if not is_over:
            return
        with self._changed:
            if reads is None:
                self._rehearses_until = None
            elif not self._is_outdated():
                del self.expected[reads[0]]
        self._end_ahead()
        if self._rehearses_until is None:
            device.give_back_heap()  # nothing is computed until the next request

    def _is_outdated(self) -> bool:
        """Return whether the prompt that is read ahead is no longer expected."""
        return self._reads is not None and self.expected.get(self._reads[0]) is not self._reads[1]

    def _end_ahead(self) -> None:
        """End the work for later requests now, so that its request leaves the engine. What is left of it is done when the engine is idle
        again."""
        ahead, self._ahead, self._reads = self._ahead, None, None
        if ahead is not None:
            with suppress(Exception):
                ahead.close()

    def _note_load(self, engine: Engine) -> None:
        now = time.monotonic()
        if engine.is_idle or now - self._noted_at > _NOTES_EVERY:
            self._noted_at = now
            self.load = Load(
                engine.num_running,
                engine.num_waiting,
                engine.nbytes,
                engine.prefix.tree.nbytes,
                mx.get_active_memory(),
                0 if engine.prefix.disk is None else engine.prefix.disk.nbytes,
                None if engine.prefix.disk is None else replace(engine.prefix.disk.stats),
                0 if engine.text_files is None else engine.text_files.num_failed,
                engine.stores_off,
                engine.exact_width,
            )

    def _step(self, engine: Engine) -> None:
        """Run one step, put its events into their streams, and end the streams of requests that ended. Raises an exception of the step
        that ended no request."""
        with self._changed:
            streams = {s.request.number: s for s in self._open if s.request is not None}
        error: Exception | None = None
        events: list[Event] = []
        try:
            engine.rest(frozenset(number for number, s in streams.items() if s.is_behind))
            events = engine.step()
        except Exception as raised:
            error = raised
        asked = [(s, s.request) for s in streams.values() if s.request is not None]
        ended = [(s, r, r.finish_reason) for s, r in asked if r.finish_reason is not None]
        for stream, _, _ in ended:
            self._forget(stream)  # before its reader has the end: what is open then are the streams of others
        for event in events:
            if event.request in streams:
                streams[event.request].put(event)
        for stream, request, reason in ended:
            why = request.error or (None if error is None else _described(error))
            stream.put(_finish(request.number, reason, why))
        if error is not None and not ended:
            raise error

    def _end(self, state: State, why: BaseException) -> None:
        """Set the final state, end open streams with the sentence of `why`, and refuse new ones with it. Later calls do nothing."""
        with self._changed:
            if self._state in ("stopped", "failed"):
                return
            self._state, self._why = state, why
            atexit.unregister(self._exit)
            streams, commands = tuple(self._open), (*self._commands, *self._pieces)
            self._open.clear()
            self.expected.clear()
            self._commands.clear()
            self._pieces.clear()
            self._changed.notify_all()
        for command in commands:
            command(None)
        for stream in streams:
            if stream.request is None:
                stream.refuse(EngineStoppedError(str(why)))
            else:
                reason: FinishReason = "cancelled" if state == "stopped" else "error"
                stream.put(_finish(stream.request.number, reason, str(why)))


def _finish(number: int, reason: FinishReason, why: str | None) -> FinishEvent:
    return FinishEvent(request=number, reason=reason, error=why)


def _described(error: BaseException) -> str:
    if isinstance(error, MlxspecError):
        return str(error).rstrip(".")
    return f"{type(error).__name__}: {error}".rstrip(". :")
