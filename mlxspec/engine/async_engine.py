"""`AsyncEngine`: the calls of `Engine` for asyncio. One worker thread (worker.py) owns the engine; nothing here touches MLX.

Knows requests, streams and the chat format; knows no thread but through the worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.api import (
    Conversation,
    Conversations,
    Prompt,
    Prompts,
    Result,
    conversations,
    paired,
    with_fields,
)
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load
from mlxspec.engine.stream import Stream
from mlxspec.engine.worker import Worker
from mlxspec.errors import CancelledError, ConfigError
from mlxspec.events import Event, FinishEvent
from mlxspec.option import by_name


class AsyncEngine:
    """A loaded model in an event loop.

        async with AsyncEngine("demo") as engine:
            result = await engine.generate("def main():")
            async for event in engine.chat(messages, stream=True):
                ...

    Takes what `mlxspec.load` takes. Loading begins at once, in a thread of its own; the first call waits for it. Calls made together
    decode together. Cancelling the task that awaits an answer, or closing a stream, cancels the request.
    """

    @by_name
    def __init__(self, model: str | os.PathLike[str] = "demo", **options: Any) -> None:
        self.worker = Worker(lambda: load(model, **options))

    async def ready(self) -> Engine:
        """Wait until the model is loaded. Raises what loading raised. Of the engine use what never changes: name, tokenizer, config."""
        return await asyncio.to_thread(self.worker.wait_ready)

    async def close(self) -> None:
        """End all requests and the thread."""
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

    @overload
    async def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Result: ...

    @overload
    async def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> list[Result]: ...

    @by_name
    async def generate(
        self,
        prompts: Prompt | Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Result | list[Result]:
        """Answer one prompt (a Result) or several together (a list, in order). fields: as in `Engine.generate`. Raises
        MlxspecError subclasses."""
        asked, single = paired(prompts, with_fields(params, fields))
        streams = [self.worker.submit(p, s, spec=spec) for p, s in asked]
        try:
            for stream in streams:  # if one is refused, none is answered
                await stream.accepted()
            results = [await _result(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        return results[0] if single else results

    @by_name
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Stream:
        """Events of one answer: iterate it with `async for`; leaving `async with` cancels the request. What is wrong with the request is
        raised by the first event."""
        return self.worker.submit(prompt, with_fields(params, fields), spec=spec)

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Awaitable[Result]: ...

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> AsyncIterator[Event]: ...

    @overload
    def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Awaitable[list[Result]]: ...

    @by_name
    def chat(
        self,
        messages: Conversation | Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Awaitable[Result] | AsyncIterator[Event] | Awaitable[list[Result]]:
        """Answers a conversation like `Engine.chat`: awaited, a Result, or a list of them for several conversations; with `stream` the
        events of one."""
        asked, single = conversations(messages)
        params = with_fields(params, fields)
        if not stream:
            return self._chat(asked, params, spec, template, single)
        if not single or isinstance(params, Sequence):
            raise ConfigError("One conversation is streamed at a time.")
        return self._chat_events(asked[0], params, spec, template)

    async def _chat(
        self,
        asked: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None,
        spec: SpecConfig | None,
        template: Mapping[str, Any] | None,
        single: bool,
    ) -> Any:
        engine = await self.ready()
        prompts: Prompts = [engine.chat_input(m, template) for m in asked]
        results = await self.generate(prompts, params, spec=spec)
        return results[0] if single else results

    async def _chat_events(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        spec: SpecConfig | None,
        template: Mapping[str, Any] | None,
    ) -> AsyncIterator[Event]:
        prompt = (await self.ready()).chat_input(messages, template)
        async with self.stream(prompt, params, spec=spec) as events:
            async for event in events:
                yield event


async def _result(stream: Stream) -> Result:
    end: FinishEvent | None = None
    async for event in stream:
        if isinstance(event, FinishEvent):
            end = event
    if stream.request is None or end is None:
        raise CancelledError("The request was cancelled before it began.")
    return replace(Result.of(stream.request), finish_reason=end.reason, error=end.error)
