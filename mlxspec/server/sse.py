"""Server-sent events: writes objects and comments as the bytes of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n".encode()


def named(value: Any) -> bytes:
    """An event that is called after the value's member `type`."""
    return f"event: {value['type']}\n".encode() + data(value)


def comment(text: str) -> bytes:
    """Ignored by clients; keeps the connection from being taken for dead."""
    return f": {text}\n\n".encode()


async def with_pauses(items: AsyncIterator[T], seconds: float) -> AsyncIterator[T | None]:
    """The items, and None whenever there was none for so long."""
    step: asyncio.Future[T] | None = None
    try:
        while True:
            step = step or asyncio.ensure_future(anext(items))  # type: ignore[arg-type]
            done, _ = await asyncio.wait({step}, timeout=seconds)
            if not done:
                yield None
                continue
            ready, step = step, None
            try:
                item = ready.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if step is not None:
            step.cancel()
            await asyncio.wait({step})
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()
