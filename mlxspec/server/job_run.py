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
    """The progress of the prompt of answer `choice`: num_done of its num_total tokens are in the cache, num_cached of these from the
    prefix cache. seconds: the time since the prompt began to be read."""

    choice: int
    num_done: int
    num_total: int
    num_cached: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New text of answer `choice`. pieces: empty where tokens were committed whose text is held back. stats: the request's statistics,
    which the engine goes on changing. tokens, logprobs: of the new tokens. drafted: for each piece, the number of characters at its
    beginning that are from accepted drafted tokens; drafter: the name of the drafter that drafted them."""

    choice: int
    pieces: Sequence[Piece]
    stats: RequestStats
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    drafted: Sequence[int] = ()
    drafter: str | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of answer `choice`. reason: as OpenAI's `finish_reason`. cause: `end`, an end token or the end of a grammar;
    `stop_string`; `limit`, the request's max_tokens; `context`, the end of the context. stop_string: the one that ended the answer.
    prompt_logprobs: the prompt's log-probabilities, where requested. receipt: the comparison with plain decoding, where requested."""

    choice: int
    reason: EndReason
    cause: EndCause
    stats: RequestStats
    stop_string: str | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    receipt: Receipt | None = None


Update = Progress | Delta | End


class JobRun:
    """A run of a job. `start` submits all answers and returns once the engine has accepted them, or raises its error; `updates` then
    yields what happens to them. num_held: characters of the tool call that is being written. answer: the pieces of the only answer,
    once it is complete."""

    def __init__(
        self, job: Job, worker: Worker, client: str = "", keep: Callable[[Request], None] | None = None
    ) -> None:
        """Prepare the run; submits nothing yet. client: the client's name, by which the engine lets clients take turns. keep: called
        with the request of each complete answer, in a separate thread."""
        self._job, self._worker, self._client, self._keep = job, worker, client, keep
        self._streams: list[Stream] = []
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.num_held = 0  # characters of a call that is being written
        self.answer: tuple[str, bool] | None = (
            None  # of the only answer, once it is complete: its text, whether a limit cut it
        )

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
        """Decode an answer again without drafts, and return the comparison. Raises ApiError where decoding fails."""
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
        """Cancel the answers that have not ended."""
        for stream in self._streams:
            stream.close()

    async def updates(self, pause_seconds: float | None = None) -> AsyncIterator[Update | None]:
        """Yield the updates of all answers as they happen, and None each time no update has happened for pause_seconds (None: never).
        Raises ApiError when an answer fails, and cancels the others."""
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
        has_calls = False
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
                    self.answer = request.answer.text, event.reason == "length"
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
    """Return the pieces of an event's text, and for each the number of characters at its beginning that are from accepted drafted
    tokens. Text that the parser has held back counts like the text that released it."""
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
    """Return the error for an answer that ended before it was complete. Its status is 4xx where the client's request is the cause, else
    5xx."""
    if request.has_expired:
        return ApiError(event.error or "There was not enough time.", status=408, code="timeout")
    if event.reason == "cancelled":
        return ApiError(event.error or "The request was cancelled.", status=503, kind=BUSY, code="cancelled")
    if isinstance(request.failure, MlxspecError):
        return to_api_error(request.failure)
    return ApiError(event.error or "The answer failed.", status=500, kind=SERVER, code="answer_failed")
