"""What a writer of answers is: it turns the updates of a job into the objects of one API, and says how these become bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlxspec.server import sse
from mlxspec.server.errors import ApiError
from mlxspec.server.job_run import Update


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How a stream's objects become bytes. comment: a text that clients ignore, None where the format has no comments."""

    media: str
    frame: Callable[[Any], bytes]
    last: bytes = b""
    comment: Callable[[str], bytes] | None = None


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


_EVENTS = "text/event-stream; charset=utf-8"
DATA = Wire(media=_EVENTS, frame=sse.data, last=sse.DONE, comment=sse.comment)
DATA_WITHOUT_DONE = Wire(media=_EVENTS, frame=sse.data, comment=sse.comment)
NAMED_EVENTS = Wire(media=_EVENTS, frame=sse.named, comment=sse.comment)
LINES = Wire(media="application/x-ndjson", frame=_line)


class AnswerProtocol:
    """One response. Streamed: `begin`, `chunks` for each update, `pause` when there was none for a while, `end`; `failed` in place of the
    rest where an error ends it. Whole: `take` for each update, then `whole`."""

    wire: Wire = DATA

    def begin(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def pause(self) -> dict[str, Any] | None:
        """An object that tells the client that the server is there; None: the wire's comment does."""
        return None

    def end(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield error.body

    def take(self, update: Update) -> None:
        raise NotImplementedError

    def whole(self) -> Any:
        raise NotImplementedError
