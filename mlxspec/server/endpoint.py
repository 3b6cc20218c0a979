"""Adapts a function to ASGI: reads the body, runs the work, cancels it when the client disconnects, answers every error.

Starlette cancels streams when a client disconnects, but no other handlers. Here both are cancelled.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from mlxspec.errors import MlxspecError
from mlxspec.server import log
from mlxspec.server.body import parse, read
from mlxspec.server.errors import ApiError, to_api_error
from mlxspec.server.fairness import LARGE, Gate, Lanes, client_of
from mlxspec.server.limits import ServerLimits
from mlxspec.server.metrics import Metrics
from mlxspec.server.security import Receive, Scope, Send, answer_error

T = TypeVar("T")


class Reply:
    """What is sent back: one JSON object, one text, or a stream. path: the request's, which decides the form of errors."""

    def __init__(self, send: Send, path: str = "") -> None:
        self._send, self._path = send, path
        self._failed: Callable[[ApiError], bytes] | None = None
        self.status = 0

    async def json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        await self.encoded(encode(value), headers)

    async def encoded(self, text: str, headers: Mapping[str, str] | None = None) -> None:
        """JSON that has been written already."""
        await self.text(text, "application/json", headers)

    async def text(self, text: str, kind: str, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode()
        await self._start(200, {"content-type": kind, "content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def empty(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        """An answer without a body."""
        await self._start(status, headers or {})
        await self._send({"type": "http.response.body", "body": b""})

    async def start_stream(self, media: str, failed: Callable[[ApiError], bytes]) -> None:
        """failed: what is sent in place of the rest where an error ends the stream."""
        self._failed = failed
        await self._start(
            200, {"content-type": media, "cache-control": "no-store", "x-accel-buffering": "no"}
        )

    async def event(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_stream(self, piece: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": piece})

    async def error(self, error: BaseException) -> None:
        """An error in the stream where one runs, else as the answer."""
        found = to_api_error(error)
        if not self.status:
            self.status = found.status
            await answer_error(found, self._send, self._path)
        elif self._failed is not None:
            await self.end_stream(self._failed(found))

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(k.encode(), v.encode("ascii", "backslashreplace")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def encode(value: Any) -> str:
    """As JSON. Large values take long, and need not be written in the event loop."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: its body, whose it is, whether it is so large that the event loop must not work on it, and where else to."""

    request: Request
    client: str
    body: dict[str, Any] = field(default_factory=dict)
    is_large: bool = False
    lanes: Lanes

    async def off_loop(self, work: Callable[[], T], *, is_large: bool = False) -> T:
        """`work`, in the client's turn, in a thread that prepares requests."""
        return await self.lanes.run(self.client, work, is_large=is_large or self.is_large)


Work = Callable[[Asked, Reply], Coroutine[Any, Any, None]]


class Endpoint:
    """An ASGI application around `work(asked, reply)`; the body is {} where none is read."""

    def __init__(
        self,
        work: Work,
        limits: ServerLimits,
        metrics: Metrics,
        gate: Gate,
        lanes: Lanes,
        *,
        reads_body: bool,
    ) -> None:
        self._work, self._limits, self._metrics = work, limits, metrics
        self._gate, self._lanes, self._reads_body = gate, lanes, reads_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, reply, started = Request(scope, receive), Reply(send, scope["path"]), time.monotonic()
        said, client = "", client_of(scope)
        try:
            if self._reads_body:
                with self._gate.body() as take:
                    raw = await read(request, self._limits, take)
                    with self._gate.passed(client):
                        doing = self._parsed(request, client, raw, reply)
                        del raw
                        is_done = await self._run(doing, receive)
            else:
                asked = Asked(request=request, client=client, lanes=self._lanes)
                is_done = await self._run(self._work(asked, reply), receive)
            if not is_done:
                said = "client went away"
        except ClientDisconnect:
            said = "client went away"
        except Exception as error:
            found = to_api_error(error)
            said = str(found)
            if found.status == 500 and not isinstance(error, MlxspecError):
                log.failure(error)
            with suppress(OSError):
                await reply.error(error)
            # a task's exception and the frame that waited for the task refer to each other: the frames' locals, the body among them,
            # would stay until the garbage collector looks, which counts objects and not their bytes
            traceback.clear_frames(error.__traceback__)
        self._finish(scope, reply, said, time.monotonic() - started)

    async def _parsed(self, request: Request, client: str, raw: bytes, reply: Reply) -> None:
        asked = Asked(request=request, client=client, is_large=len(raw) > LARGE, lanes=self._lanes)
        parsed = partial(parse, raw, self._limits)
        del raw
        body = await asked.off_loop(parsed) if asked.is_large else parsed()
        del parsed
        await self._work(replace(asked, body=body), reply)

    async def _run(self, doing: Coroutine[Any, Any, None], receive: Receive) -> bool:
        """False if the client went away before the end."""
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
        route = scope["route"].path if "route" in scope else scope["path"]
        if said == "client went away":
            self._metrics.add("cancelled_total")
        self._metrics.add("requests_total", route=route, status=str(reply.status or 499))
        log.request(scope, reply.status or 499, seconds, said)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
