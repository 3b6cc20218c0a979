"""From ASGI to a function and back: reads the body, runs the work, cancels it the moment the client goes away, answers every error.

Starlette cancels streams when a client goes but not other handlers; here both are one thing. Knows no route.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request

from mlxspec.errors import MlxspecError
from mlxspec.server import log, sse
from mlxspec.server.body import read_object
from mlxspec.server.errors import to_api_error
from mlxspec.server.metrics import Metrics
from mlxspec.server.security import Receive, Scope, Send, answer_error
from mlxspec.server.settings import ServerConfig


class Reply:
    """What is sent back: one JSON object, one text, or a stream of events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        await self.text(json.dumps(value, ensure_ascii=False), "application/json", headers)

    async def text(self, text: str, kind: str, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode()
        await self._start(200, {"content-type": kind, "content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def start_events(self, headers: Mapping[str, str] | None = None) -> None:
        kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        await self._start(200, {**kind, "x-accel-buffering": "no", **(headers or {})})

    async def event(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_events(self, piece: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": piece})

    async def error(self, error: BaseException) -> None:
        """An error in the stream where one runs, else as the answer."""
        if self.status:
            await self.end_events(sse.data(to_api_error(error).body))
        else:
            self.status = to_api_error(error).status
            await answer_error(error, self._send)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(k.encode(), v.encode("ascii", "backslashreplace")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


Work = Callable[[Request, dict[str, Any], Reply], Awaitable[None]]


class Endpoint:
    """An ASGI application around `work(request, body, reply)`; body is {} where none is read."""

    def __init__(self, work: Work, config: ServerConfig, metrics: Metrics, *, reads_body: bool) -> None:
        self._work, self._config, self._metrics = work, config, metrics
        self._reads_body = reads_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, reply, started = Request(scope, receive), Reply(send), time.monotonic()
        said = ""
        try:
            body = await read_object(request, self._config) if self._reads_body else {}
            if not await self._run(request, body, reply, receive):
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
        self._finish(scope, reply, said, time.monotonic() - started)

    async def _run(self, request: Request, body: dict[str, Any], reply: Reply, receive: Receive) -> bool:
        """False if the client went away before the end."""
        work = asyncio.ensure_future(self._work(request, body, reply))
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
