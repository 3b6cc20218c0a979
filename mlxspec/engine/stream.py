"""The event stream of one request: filled by the engine's thread, read from another thread or an event loop.

The worker (worker.py) writes, one consumer reads.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from mlxspec.errors import CancelledError
from mlxspec.events import Event, FinishEvent, TokensEvent

if TYPE_CHECKING:
    from mlxspec.engine.request import Request


class Stream:
    """The events of one request; a FinishEvent always ends them. Iterate over it with `for` or with `async for`, not both.

    `wait_accepted` (or `await accepted()`) returns the engine's Request once it is queued, or raises the reason why it cannot be: an
    MlxspecError such as ConfigError, ContextOverflowError, GrammarError. Iterating raises the same error before the first event. Closing
    the stream (`close`, `aclose`, leaving `with` or `async with`) cancels the request at any stage; closing twice or after the end does
    nothing.

    Read `request` (its statistics, its text) only after the end; before, it belongs to the engine's thread. is_behind: whether its row
    should pause, because as many tokens as allowed wait to be read; it stays True until fewer than half of that number do.
    """

    def __init__(self, cancel: Callable[[Stream], None], most_unread: int | None = None) -> None:
        """Make a stream without events. cancel: ends the request; called with this stream by `close`. most_unread: tokens that may wait
        to be read; None: any number."""
        self._cancel = cancel
        self._most_unread, self._num_unread, self.is_behind = most_unread, 0, False
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._wakers: list[Callable[[], None]] = []
        self._refusal: BaseException | None = None
        self._is_done = False  # no more events will come
        self._is_accepted = False
        self.request: Request | None = None

    # --- for the consumer

    def wait_accepted(self, timeout: float | None = None) -> Request:
        """Wait until the engine has queued the request, and return the request. Raises the reason where it was refused, and TimeoutError
        after `timeout` seconds (None: never)."""
        with self._changed:
            if not self._changed.wait_for(self._is_decided, timeout):
                raise TimeoutError("The engine has not answered yet.")
            return self._decision()

    async def accepted(self) -> Request:
        """Wait like `wait_accepted`, but in an event loop, and return the request."""
        await self._until(self._is_decided)
        with self._changed:
            return self._decision()

    def get(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event and return it; None after the last one. Raises TimeoutError after `timeout` seconds without an event
        (None: never)."""
        with self._changed:
            if not self._changed.wait_for(self._is_readable, timeout):
                raise TimeoutError("There was no event in this time.")
            return self._pop()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self.get()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        await self._until(self._is_readable)
        with self._changed:
            event = self._pop()
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """Cancel the request unless it has ended. Never waits for the engine."""
        if not self._is_done:
            self._cancel(self)

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def is_done(self) -> bool:
        """Return whether the request has ended or was refused; events may still wait to be read."""
        return self._is_done

    # --- for the worker

    def accept(self, request: Request) -> None:
        """Note that the engine has queued the request."""
        with self._changed:
            self.request, self._is_accepted = request, True
            self._wake()

    def refuse(self, error: BaseException) -> None:
        """End the stream with an error: its request never runs. Does nothing after the stream's end."""
        with self._changed:
            if not self._is_done:
                self._refusal, self._is_done = error, True
                self._wake()

    def put(self, event: Event) -> None:
        """Add an event. A FinishEvent is the last one; events after it are dropped."""
        with self._changed:
            if self._is_done:
                return
            self._events.append(event)
            self._is_done = isinstance(event, FinishEvent)
            self._count(event, 1)
            self._wake()

    # --- with the lock held

    def _is_decided(self) -> bool:
        return self._is_accepted or self._is_done

    def _is_readable(self) -> bool:
        return bool(self._events) or self._is_done

    def _decision(self) -> Request:
        if self._refusal is not None:
            raise self._refusal
        if self.request is None:
            raise CancelledError("The request was cancelled before the engine took it.")
        return self.request

    def _pop(self) -> Event | None:
        if self._events:
            event = self._events.popleft()
            self._count(event, -1)
            return event
        if self._refusal is not None:
            raise self._refusal
        return None

    def _count(self, event: Event, sign: int) -> None:
        if self._most_unread is not None and isinstance(event, TokensEvent):
            self._num_unread += sign * len(event.tokens)
            self.is_behind = self._num_unread >= self._most_unread // (2 if self.is_behind else 1)

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait in the running event loop until `ready` returns True. Cancelling the wait loses no event."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if ready():
                    return
                future: asyncio.Future[None] = loop.create_future()
                waker = _waker(loop, future)
                self._wakers.append(waker)
            try:
                await future
            finally:
                with self._changed, suppress(ValueError):
                    self._wakers.remove(waker)


def _waker(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[[], None]:
    def finish() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has been closed, so no task waits
            loop.call_soon_threadsafe(finish)

    return wake
