"""Runs the answers of a request and gives one stream of events, from which every protocol of this server is written.

    Progress   a piece of a prompt has been read
    Delta      text of one answer, taken apart, with its tokens' log-probabilities
    End        one answer is complete

Leaving the iterator, at whatever stage, cancels what runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.api import Result, proof
from mlxspec.engine.calls import Prompt
from mlxspec.engine.receipt import Receipt
from mlxspec.engine.request import UNREAD
from mlxspec.engine.stream import Stream
from mlxspec.engine.worker import Worker
from mlxspec.errors import MlxspecError
from mlxspec.events import FinishEvent, TokenLogprob, TokensEvent
from mlxspec.parsers.pieces import CallStart, Content, OutputParser, Piece, merged
from mlxspec.server.errors import BUSY, SERVER, ApiError, to_api_error
from mlxspec.server.job import AnswerRequest, Job

if TYPE_CHECKING:
    from mlxspec.engine.request import Request
    from mlxspec.engine.stats import RequestStats
    from mlxspec.sampling.constraints import Compiled

_AT_ONCE = 16  # updates that wait to be written; more wait in the streams, which are bounded
EndReason = Literal["stop", "length", "tool_calls"]
EndCause = Literal["end", "stop_string", "limit", "context"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of answer `choice`: num_done of the prompt's num_total tokens are in, num_cached of them from the prefix cache. seconds:
    since the prompt began to be read."""

    choice: int
    num_done: int
    num_total: int
    num_cached: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Delta:
    """More of answer `choice`. pieces may be empty while tokens came whose text is held back. stats: as they are now; the engine goes on
    counting in them. drafted: for each piece, how many characters at its beginning come from accepted draft tokens; drafter: who drafted
    them."""

    choice: int
    pieces: Sequence[Piece]
    stats: RequestStats
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    drafted: Sequence[int] = ()
    drafter: str | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """Answer `choice` is complete. cause: the model (or a grammar) ended it, a stop string did, or there was no room for more tokens,
    by the request's limit or in the context. stop_string: the one that ended it. prompt_logprobs: where they are wanted. receipt: whether
    plain decoding gives the same tokens, where that is wanted."""

    choice: int
    reason: EndReason
    cause: EndCause
    stats: RequestStats
    stop_string: str | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    receipt: Receipt | None = None


Update = Progress | Delta | End


class JobRun:
    """Runs a job. `start` returns when the engine has taken all of it, or raises why not; then iterate."""

    def __init__(
        self, job: Job, worker: Worker, client: str = "", keep: Callable[[Request], None] | None = None
    ) -> None:
        """client: whose job it is, for the engine's turns. keep: is given each complete answer, in a thread of its own."""
        self._job, self._worker, self._client, self._keep = job, worker, client, keep
        self._streams: list[Stream] = []
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.num_held = 0  # characters of a call that is being written
        self.answer: list[Piece] | None = None  # of a job with one answer, once it is complete

    async def start(self) -> None:
        try:
            for one in self._job.asks:
                self._submit(one.prompt, one.params, self._job.spec, self._job.compiled)
            for stream in self._streams:
                await stream.accepted()
        except BaseException:
            self.close()
            raise

    def _submit(
        self, prompt: Prompt, params: SamplingParams, spec: SpecConfig, compiled: Compiled | None
    ) -> Stream:
        stream = self._worker.submit(
            prompt,
            params,
            spec=spec,
            deadline=self._job.timeout,
            compiled=compiled,
            client=self._client,
            most_unread=UNREAD,
        )
        self._streams.append(stream)
        return stream

    async def _prove(self, ask: AnswerRequest, request: Request) -> Receipt:
        """Decodes the answer again without drafts. Raises ApiError where that fails."""
        steps = proof(ask.prompt, Result.of(request), request.params)
        said, compiled, plainly = None, self._job.compiled, SpecConfig(owner=self._job.spec.owner)
        while True:
            try:
                prompt, params = steps.send(said)
            except StopIteration as done:
                receipt: Receipt = done.value
                return receipt
            stream, compiled = self._submit(prompt, params, plainly, compiled), None
            async for event in stream:
                if isinstance(event, FinishEvent) and event.reason in ("error", "cancelled"):
                    raise _failed(event, await stream.accepted())
            said = Result.of(await stream.accepted())

    def close(self) -> None:
        """Cancel what still runs."""
        for stream in self._streams:
            stream.close()

    async def updates(self, pause_seconds: float | None = None) -> AsyncIterator[Update | None]:
        """None whenever there was nothing for so long. Raises ApiError when an answer fails; the others end with it."""
        queue: asyncio.Queue[Update | BaseException | None] = asyncio.Queue(_AT_ONCE)
        tasks = [asyncio.create_task(self._feed(i, s, queue)) for i, s in enumerate(self._streams)]
        running = len(tasks)
        try:
            while running:
                try:
                    async with asyncio.timeout(pause_seconds):
                        item = await queue.get()
                except TimeoutError:
                    yield None
                    continue
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            self.close()
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task

    async def _feed(
        self, choice: int, stream: Stream, queue: asyncio.Queue[Update | BaseException | None]
    ) -> None:
        try:
            async for update in self._follow(choice, stream):
                await queue.put(update)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    async def _follow(self, choice: int, stream: Stream) -> AsyncIterator[Update]:
        parser = self._job.parser()
        has_calls, whole = False, list[Piece]()
        reads_since: float | None = None
        async for event in stream:
            request = stream.request
            if request is None:
                raise RuntimeError("a stream with events has a request")
            stats = request.stats
            if isinstance(event, TokensEvent):
                if self.first_token is None:
                    self.first_token = time.monotonic()
                pieces, drafted = _pieces(parser, event)
                has_calls = has_calls or any(isinstance(p, CallStart) for p in pieces)
                whole += pieces
                self.num_held = 0 if parser is None else parser.num_held
                yield Delta(
                    choice=choice,
                    pieces=pieces,
                    stats=stats,
                    tokens=event.tokens,
                    logprobs=event.logprobs or (),
                    drafted=drafted,
                    drafter=event.drafter,
                )
            elif isinstance(event, FinishEvent):
                if event.reason in ("error", "cancelled"):
                    raise _failed(event, request)
                rest = parser.finish(cut=event.reason == "length") if parser else []
                stats.notices += parser.notices if parser else ()
                has_calls = has_calls or any(isinstance(p, CallStart) for p in rest)
                if rest:
                    yield Delta(choice=choice, pieces=rest, stats=stats, drafted=[0] * len(rest))
                if self._keep is not None:
                    await asyncio.to_thread(self._keep, request)
                if request.spec.predicted:
                    await asyncio.to_thread(request.count_foretold)
                if len(self._streams) == 1:
                    self.answer = [*whole, *rest]
                cause = _cause(request)
                reason: EndReason = (
                    "length" if event.reason == "length" else "tool_calls" if has_calls else "stop"
                )
                yield End(
                    choice=choice,
                    reason=reason,
                    cause=cause,
                    stats=stats,
                    stop_string=request.answer.stop_string,
                    prompt_logprobs=request.prompt_logprobs or (),
                    receipt=await self._prove(self._job.asks[choice], request) if self._job.proves else None,
                )
            else:
                done, now = [event.num_done], time.monotonic()
                if reads_since is None:  # the first says what the prefix cache had
                    reads_since = now - stats.prefill_seconds
                    done = sorted({event.num_cached, event.num_done})
                for num_done in done:
                    yield Progress(
                        choice=choice,
                        num_done=num_done,
                        num_total=event.num_total,
                        num_cached=event.num_cached,
                        seconds=now - reads_since if num_done > event.num_cached else 0.0,
                    )


def _pieces(parser: OutputParser | None, event: TokensEvent) -> tuple[list[Piece], list[int]]:
    """The pieces of an event's text, and for each how many characters at its beginning come from accepted draft tokens. Text that the
    parser held back counts with the text that released it."""
    if parser is None:
        return [Content(event.text)], [event.num_drafted_chars]
    drafted, own = event.text[: event.num_drafted_chars], event.text[event.num_drafted_chars :]
    if not drafted:
        pieces = parser.push(own)
        return pieces, [0] * len(pieces)
    pieces = parser.push(drafted)
    counts = [_length(p) for p in pieces]
    rest = parser.push(own) if own else []
    if pieces and rest and len(joined := merged([pieces[-1], rest[0]])) == 1:
        pieces, rest = [*pieces[:-1], *joined], rest[1:]  # as one push of the whole text would give
    return [*pieces, *rest], [*counts, *[0] * len(rest)]


def _length(piece: Piece) -> int:
    return 0 if isinstance(piece, CallStart) else len(piece.text)


def _cause(request: Request) -> EndCause:
    if request.finish_reason == "length":
        return "context" if len(request.history) >= request.max_context else "limit"
    by_grammar = request.constraints is not None and request.constraints.is_finished
    return "end" if request.end_token is not None or by_grammar else "stop_string"


def _failed(event: FinishEvent, request: Request) -> ApiError:
    """Return the error of an answer that ended before it was complete. What the client asked for and cannot be had is its error, not the
    server's."""
    if request.has_expired:
        return ApiError(event.error or "There was not enough time.", status=408, code="timeout")
    if event.reason == "cancelled":
        return ApiError(event.error or "The request was cancelled.", status=503, kind=BUSY, code="cancelled")
    if isinstance(request.failure, MlxspecError):
        return to_api_error(request.failure)
    return ApiError(event.error or "The answer failed.", status=500, kind=SERVER, code="answer_failed")
