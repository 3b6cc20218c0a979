"""Lets clients take turns before the engine: for a place among the open requests, and for time of the threads that prepare them.

A client is the address of a connection. All programs on this machine itself share one address, so there each connection is a client.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from mlxspec.errors import CancelledError
from mlxspec.server.errors import BUSY, ApiError
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.settings import is_loopback

T = TypeVar("T")
LARGE = 32 << 10  # bytes of a body from which on nothing is done with it in the event loop


def client_of(scope: Mapping[str, Any]) -> str:
    """Return the name of the client of a request: its address, with the port where the address is this machine's. scope: the request's
    ASGI scope."""
    host, port = (scope.get("client") or ("", 0))[:2]
    return f"{host}:{port}" if is_loopback(host or "127.0.0.1") else str(host)


class Gate:
    """A limit to the number of open requests and to the bytes of their bodies. One client may have at most half of the requests. A body
    of up to LARGE bytes is never refused for lack of bytes."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.num_bytes = 0
        self._open: Counter[str] = Counter()

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Return a context in which a body is read and answered; its bytes count until the end of the context. The context's value is a
        function to be called with the size of each piece in bytes; it raises ApiError with status 503 where all bodies together are
        too large."""
        size = 0

        def take(num_bytes: int) -> None:
            nonlocal size
            size += num_bytes
            self.num_bytes += num_bytes
            if size > LARGE and self.num_bytes > self.limits.max_bodies:
                raise _busy("Too many large requests are open; try again in a little while.")

        try:
            yield take
        finally:
            self.num_bytes -= size

    @contextmanager
    def passed(self, client: str) -> Iterator[None]:
        """Return a context in which one more request of a client is open. Entering it raises ApiError with status 503 where too many are
        open."""
        most = self.limits.max_requests
        if self._open.total() >= most or self._open[client] >= max(1, most // 2):
            raise _busy("Too many requests are open; try again in a little while.")
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


def _busy(message: str) -> ApiError:
    return ApiError(message, status=503, kind=BUSY, code="too_many_requests")


class Ticket:
    """A record of whether a caller still waits for a piece of work. Work that takes long calls `check` between its steps."""

    def __init__(self) -> None:
        self._is_void = False

    def void(self) -> None:
        self._is_void = True

    def check(self) -> None:
        """Raise CancelledError if no caller waits any more."""
        if self._is_void:
            raise CancelledError("The client has gone.")


class _Current(threading.local):
    ticket: Ticket | None = None


_current = _Current()


def check_wanted() -> None:
    """Raise CancelledError if no caller waits any more for the work that this thread of a Lane does. Long work calls it between its
    steps; it does nothing in other threads."""
    if _current.ticket is not None:
        _current.ticket.check()


class Lane:
    """A pool of threads that run functions for clients in turns. The next function is that of the waiting client that was served longest
    ago; each client's functions run in order. A client has one function running at a time unless no other client waits."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._changed = threading.Condition()
        # in the order of service
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Ticket, Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread of the pool, and return its result or raise its exception. If the wait is cancelled, work that has not
        begun is skipped, and `check_wanted` ends work that runs."""
        future: Future[T] = Future()
        ticket = Ticket()
        with self._changed:
            if self._is_closed:
                raise CancelledError("The server is being stopped.")
            self._waiting.setdefault(client, deque()).append((future, ticket, work))
            self._changed.notify()
        try:
            return await asyncio.wrap_future(future)
        finally:
            ticket.void()

    def close(self) -> None:
        """End the threads after their current functions. Does not wait for them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting)
                if self._is_closed:
                    return
                client, (future, ticket, work) = self._next()
                self._running[client] += 1
            try:
                if future.set_running_or_notify_cancel():
                    _current.ticket = ticket
                    try:
                        result = work()
                    except BaseException as error:
                        future.set_exception(error)
                    else:
                        future.set_result(result)
            finally:
                _current.ticket = None
                del future, work
                with self._changed:
                    self._running[client] -= 1
                    if not self._running[client]:
                        del self._running[client]

    def _next(self) -> tuple[str, tuple[Future[Any], Ticket, Callable[[], Any]]]:
        """Remove the next function from the queue, and return it with its client, future and ticket. Called with the lock held, while
        the queue is not empty."""
        client = next((c for c in self._waiting if not self._running[c]), next(iter(self._waiting)))
        queue = self._waiting[client]
        found = queue.popleft()
        if queue:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        return client, found


class Lanes:
    """Two pools of threads that prepare requests, one for small and one for large requests, so that small ones do not wait for large
    ones."""

    def __init__(self) -> None:
        self._small = Lane(2, "mlxspec-prepare")
        self._large = Lane(max(1, min(2, (os.cpu_count() or 2) // 2)), "mlxspec-prepare-large")

    async def run(self, client: str, work: Callable[[], T], *, is_large: bool) -> T:
        """Run `work` in the pool for large or for small requests, and return its result or raise its exception. client: the client whose
        turn is used."""
        return await (self._large if is_large else self._small).run(client, work)

    def close(self) -> None:
        self._small.close()
        self._large.close()
