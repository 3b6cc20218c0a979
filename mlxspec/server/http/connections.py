"""Limits connections: how many are open, and how long one may stay idle.

asyncio's own way to accept connections has no bound. Without descriptors left it tries again at once, thousands of times, and logs each
time; and uvicorn waits for ever for the rest of a request's headers and for a client that does not read. Here

    the number of open connections is limited; a new one takes the place of one that has no whole request: of the address with most
        connections, the one that waits longest. Connections that have sent a valid key, and others of their address, go last,
    a connection that sends no complete headers in time is closed, and so is one that reads nothing of its answer in time,
    without descriptors accepting pauses for a second, with one line in the log.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxspec.server.http import log
from mlxspec.server.http.limits import ServerLimits

_RETRY_SECONDS = 1.0
_SPARE = 48  # descriptors for everything but connections: files of models, templates, the log
_FEWEST = 8  # connections, however few descriptors there are
_DESCRIPTORS = 4096
_CONNECTION = "connection"


class Door:
    """An acceptor of the connections of one listening socket, with a limit to their number. open: the open connections."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.most = min(limits.max_connections, _descriptors_left())
        self.open: set[Connection] = set()
        self._left = asyncio.Event()

    async def accept(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections until the task is cancelled. make: makes the protocol of a connection."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except (ConnectionError, InterruptedError):
                continue
            except OSError as error:  # no descriptors, no memory: it will be ready again at once
                log.line(f"No connection can be accepted: {error.strerror}.")
                self._close_one()
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            await self._make_room()
            try:
                await loop.connect_accepted_socket(make, connection)
            except OSError:
                connection.close()

    async def _make_room(self) -> None:
        while len(self.open) >= self.most:
            self._left.clear()
            self._close_one()
            await self._left.wait()

    def _close_one(self) -> None:
        num = Counter(c.address for c in self.open)
        idle = [c for c in self.open if (c.is_idle or c.cycle.more_body) and not c.is_gone]
        known = {c.address for c in self.open if c.has_key}
        if idle:
            min(
                idle,
                key=lambda c: (c.has_key, c.address in known, -num[c.address], not c.is_idle, c.idle_since),
            ).end()

    def enter(self, connection: Connection) -> None:
        self.open.add(connection)

    def leave(self, connection: Connection) -> None:
        self.open.discard(connection)
        self._left.set()


class Connection(H11Protocol):
    """A connection of uvicorn's that is closed where it waits too long. is_idle: no request is being answered; idle_since: the time from
    which it waits, in monotonic seconds. has_key: a request of this connection had a valid API key."""

    def __init__(self, *args: Any, door: Door, **more: Any) -> None:
        super().__init__(*args, **more)
        self._door = door
        self.app_state = {_CONNECTION: self}  # which every request's scope has as its state
        self.has_key = False
        self._waiting: asyncio.TimerHandle | None = None  # for a request's headers
        self._stuck: asyncio.TimerHandle | None = None  # for the client to read
        self.idle_since = time.monotonic()
        self.is_gone = False

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def end(self) -> None:
        """Close the connection at once, and drop the bytes that have not been sent."""
        self.is_gone = True
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._door.enter(self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._waiting, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._door.leave(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(self._door.limits.send_seconds, self.end)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _watch(self) -> None:
        """Start the clock that closes the connection where the next request's headers take longer than header_seconds; stop it while a
        request is answered. Bytes that arrive do not reset the clock."""
        if not self.is_idle:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
        elif self._waiting is None:
            self.idle_since = time.monotonic()
            self._waiting = self.loop.call_later(self._door.limits.header_seconds, self._late)

    def _late(self) -> None:
        self._waiting = None
        if self._stuck is not None:  # an answer is being read: that has its own clock
            self._watch()
        else:
            self.end()


def note_key(scope: Mapping[str, Any]) -> None:
    """Note on its connection that a request had a valid API key. scope: the request's ASGI scope."""
    connection = (scope.get("state") or {}).get(_CONNECTION)
    if connection is not None:
        connection.has_key = True


def raise_descriptors() -> None:
    """Raise the limit of open files of this process to what a server needs, where the system allows it. The default on a Mac is 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _descriptors_left() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 32
    return max(_FEWEST, soft - used - _SPARE)
