"""Adapts a function to ASGI: reads the body, runs the work, cancels it when the client disconnects, answers every error.

Starlette cancels streams when a client disconnects, but no other handlers. Here both are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxspec.errors import EngineStoppedError, MlxspecError
from mlxspec.server.answer_writer import encode
from mlxspec.server.errors import ApiError, to_api_error
from mlxspec.server.forms.base import Fields
from mlxspec.server.http import log
from mlxspec.server.http.body import Unchecked, read
from mlxspec.server.http.fairness import Gate, Lanes, client_of
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.http.security import Receive, Scope, Send, check_content, error_response
from mlxspec.server.metrics import Metrics

_TOLD_SECONDS = 0.1  # in which a client that reads takes what it is told at the end
T = TypeVar("T")


class Reply:
    """The reply to a request: one response, or a stream. status: the HTTP status that has been sent; 0 before."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._failed: Callable[[ApiError], bytes] | None = None
        self.status = 0

    async def send(self, response: Response) -> None:
        self.status = response.status_code
        await response(self._scope, self._receive, self._send)

    async def json(self, value: Any) -> None:
        await self.text(encode(value), "application/json")

    async def text(self, text: str, kind: str) -> None:
        await self.send(Response(text, media_type=kind))

    async def start_stream(self, media: str, failed: Callable[[ApiError], bytes]) -> None:
        """Begin a stream. media: its Content-Type. failed: returns the bytes to send in place of the rest where an error ends the
        stream."""
        self._failed, self.status = failed, 200
        headers = Headers({"content-type": media, "cache-control": "no-store", "x-accel-buffering": "no"})
        await self._send({"type": "http.response.start", "status": 200, "headers": headers.raw})

    async def event(self, piece: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    async def error(self, error: BaseException) -> None:
        """Send an error: in the stream where one has begun, else as the response."""
        if not self.status:
            await self.send(error_response(error, self._scope["path"]))
        elif self._failed is not None:
            await self.event(self._failed(to_api_error(error)), is_last=True)


@dataclass(frozen=True, kw_only=True)
class ClientTurn:
    """A client's access to the threads that prepare requests. is_slow: the request is prepared in a thread for slow ones, so that small
    requests do not wait for it."""

    client: str
    lanes: Lanes
    is_slow: bool = False

    async def run(self, work: Callable[[], T], *, is_slow: bool = False) -> T:
        """Call `work` in a thread that prepares requests, and return its result."""
        return await self.lanes.run(self.client, work, is_large=is_slow or self.is_slow)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request to a handler. form: the checked body in the form of the route; None for a route without a body. notices: sentences for
    the client. images: a reference that keeps the body's images in memory."""

    request: Request
    turn: ClientTurn
    form: Any = None
    notices: tuple[str, ...] = ()
    images: object = None


Work = Callable[[Asked, Reply], Coroutine[Any, Any, None]]


class Endpoint:
    """An ASGI application that reads and checks a request's body, and calls `work(asked, reply)`. form: the form of the body; None for a
    route without one."""

    def __init__(
        self,
        work: Work,
        limits: ServerLimits,
        metrics: Metrics,
        gate: Gate,
        lanes: Lanes,
        *,
        form: type[Fields] | None = None,
        path: str,
    ) -> None:
        """Make the application of one route. path: the route's path, the label of its metrics; never a path that a client chose."""
        self._work, self._limits, self._metrics = work, limits, metrics
        self._gate, self._lanes, self._form, self._path = gate, lanes, form, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, reply, started = Request(scope, receive), Reply(scope, receive, send), time.monotonic()
        said, client = "", client_of(scope)
        try:
            if self._form is not None:
                check_content(request.headers, self._limits.max_body, scope["path"])
                with self._gate.body() as take:
                    raw = await read(request, self._limits, take)
                    body = Unchecked(raw, self._limits, self._form)
                    del raw
                    with self._gate.passed(client):
                        doing = self._checked(request, client, body, reply)
                        del body
                        is_done = await self._run(doing, receive)
            else:
                asked = Asked(request=request, turn=ClientTurn(client=client, lanes=self._lanes))
                is_done = await self._run(self._work(asked, reply), receive)
            if not is_done:
                said = "client went away"
        except ClientDisconnect:
            said = "client went away"
        except asyncio.CancelledError:  # nothing cancels a request but the end of the server
            said = "server ends"
            with suppress(OSError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(_TOLD_SECONDS):
                    await reply.error(EngineStoppedError("The server is being stopped."))
        except Exception as error:
            found = to_api_error(error)
            said = str(found)
            if found.status == 500 and not isinstance(error, MlxspecError):
                log.failure(error)
            with suppress(OSError):
                await reply.error(error)
            # a task's exception and the frame that waited for the task refer to each other: the frames' locals, the body among them,
            # would stay until the garbage collector looks, which counts objects and not their bytes. The frames are not cleared: where
            # several requests waited for one future, some are those of a request that still runs
            error.__traceback__ = None
        self._finish(scope, reply, said, time.monotonic() - started)

    async def _checked(self, request: Request, client: str, unchecked: Unchecked, reply: Reply) -> None:
        check = unchecked.check
        body = await self._lanes.run(client, check, is_large=True) if unchecked.is_large else check()
        turn = ClientTurn(client=client, lanes=self._lanes, is_slow=body.is_slow)
        asked = Asked(request=request, turn=turn, form=body.form, notices=body.notices, images=body.images)
        del body
        await self._work(asked, reply)

    async def _run(self, doing: Coroutine[Any, Any, None], receive: Receive) -> bool:
        """Run the coroutine until it ends or the client disconnects, which cancels it. Returns whether it ended by itself."""
        work = asyncio.ensure_future(doing)
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return True
            return False
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait({work, gone})
            if not work.cancelled():
                work.exception()  # seen

    def _finish(self, scope: Scope, reply: Reply, said: str, seconds: float) -> None:
        if said == "client went away":
            self._metrics.add("cancelled_total")
        self._metrics.add("requests_total", route=self._path, status=str(reply.status or 499))
        log.request(scope, reply.status or 499, seconds, said)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
