"""`AsyncEngine`: the calls of `Engine` for asyncio. One worker thread (worker.py) owns the engine; nothing in this module uses MLX."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.api import Result
from mlxspec.engine.calls import Calls, Prompt, ended, paired, with_fields
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load
from mlxspec.engine.stream import Stream
from mlxspec.engine.worker import Worker
from mlxspec.errors import CancelledError
from mlxspec.events import Event, FinishEvent
from mlxspec.option import by_name


class AsyncEngine(
    Calls[Coroutine[Any, Any, Result], Coroutine[Any, Any, list[Result]], AsyncIterator[Event]]
):
    """A loaded model whose calls are coroutines, for use in an event loop.

        async with AsyncEngine("demo") as engine:
            result = await engine.generate("def main():")
            async for event in engine.chat(messages, stream=True):
                ...

    Takes the arguments of `mlxspec.load`. Loading begins at once, in a thread of its own; the first call waits for it. Calls that run at
    the same time decode together. Cancelling the task that awaits an answer, or closing a stream, cancels the request.
    """

    @by_name
    def __init__(self, model: str | os.PathLike[str] = "demo", **options: Any) -> None:
        self.worker = Worker(lambda: load(model, **options))

    async def ready(self) -> Engine:
        """Wait until the model is loaded, and return the engine. Raises what loading raised. Use only the attributes of the engine that
        never change: name, tokenizer, config."""
        return await asyncio.to_thread(self.worker.wait_ready)

    async def close(self) -> None:
        """End all requests and the engine's thread."""
        await asyncio.to_thread(self.worker.stop)

    async def __aenter__(self) -> AsyncEngine:
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answer(
        self, prompts: Callable[[Any], Any], params: Any, spec: SpecConfig | None
    ) -> Result | list[Result]:
        asked, single = paired(prompts(await self.ready()), params)
        streams = [self.worker.submit(p, s, spec=spec) for p, s in asked]
        try:
            for stream in streams:  # if one is refused, none is answered
                await stream.accepted()
            results = [await _result(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        found: Result | list[Result] = ended(
            results, [None if s.request is None else s.request.failure for s in streams], single=single
        )
        return found

    async def _events_of(
        self, prompt: Callable[[Any], Any], params: Any, spec: SpecConfig | None
    ) -> AsyncIterator[Event]:
        async with self.stream(prompt(await self.ready()), params, spec=spec) as events:
            async for event in events:
                yield event

    @by_name
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Stream:
        """Return the stream of one answer's events: iterate over it with `async for`; leaving its `async with` cancels the request.
        Where the request is invalid, reading the first event raises the error."""
        return self.worker.submit(prompt, with_fields(params, fields), spec=spec)


async def _result(stream: Stream) -> Result:
    end: FinishEvent | None = None
    async for event in stream:
        if isinstance(event, FinishEvent):
            end = event
    if stream.request is None or end is None:
        raise CancelledError("The request was cancelled before it began.")
    return replace(Result.of(stream.request), finish_reason=end.reason, error=end.error)
