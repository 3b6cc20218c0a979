"""Base classes of answer writers. A writer turns the updates of a job into the objects of one API, and its wire turns these into bytes."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxspec.server.blocks import Answer, BlockEvent
from mlxspec.server.errors import ApiError
from mlxspec.server.job import Extras, Job
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.prompt import token_ids
from mlxspec.server.usage import drafting, progress, timings, usage

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The form in which a stream's objects become bytes. media: the Content-Type. frame: returns the bytes of one object. last: bytes at
    the end of the stream. comment: returns the bytes of a text that clients ignore; None where the form has no comments."""

    media: str
    frame: Callable[[Any], bytes]
    last: bytes = b""
    comment: Callable[[str], bytes] | None = None


def encode(value: Any) -> str:
    """Return a value as JSON text. Call it outside of the event loop for large values, which take long."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _data(value: Any) -> bytes:
    return f"data: {encode(value)}\n\n".encode()


def _named(value: Any) -> bytes:
    """Return a server-sent event with the name that the value's member `type` has."""
    return f"event: {value['type']}\n".encode() + _data(value)


def _comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


EVENTS, JSON_LINES = "text/event-stream", "application/x-ndjson"
DATA = Wire(media=f"{EVENTS}; charset=utf-8", frame=_data, last=b"data: [DONE]\n\n", comment=_comment)
DATA_WITHOUT_DONE = Wire(media=f"{EVENTS}; charset=utf-8", frame=_data, comment=_comment)
NAMED_EVENTS = Wire(media=f"{EVENTS}; charset=utf-8", frame=_named, comment=_comment)
LINES = Wire(media=JSON_LINES, frame=lambda value: encode(value).encode() + b"\n")


def beside(wanted: Extras, update: Delta, place: int = 0) -> dict[str, Any]:
    """Return the members that the request wants in a chunk in addition to its text. update: the update that the chunk is part of; place:
    the number of the chunk's piece in the update."""
    out: dict[str, Any] = {"timings": timings([update.stats])} if wanted.timings else {}
    if wanted.usages:
        out["usage"] = usage([update.stats], 1)
    if wanted.drafted:
        count = update.drafted[place] if place < len(update.drafted) else 0
        out["mlxspec"] = {"drafted_chars": count, "drafter": update.drafter if count else None}
    return out


class AnswerWriter:
    """A writer of one response to a job, in the objects of one API. A streamed response: `begin`, `chunks` for each update, `pause`
    where no update arrived for a while, `end`; `failed` replaces the rest where an error ends the stream. A whole response: `take`
    for each update, then `whole`.

    Each subclass writes the progress of a prompt (`_progressed`), events of blocks (`_written`, or `_grown` for all text of an update),
    the end of an answer (`_ended`) and the whole response. wire: the form of the stream. call_prefix: the beginning of the ids of tool
    calls.
    """

    wire: Wire = DATA
    call_prefix = "call_"

    def __init__(self, model: str, job: Job) -> None:
        self._model, self._job = model, job
        self._answers = [Answer(number, self.call_prefix) for number in range(len(job.asks))]

    def begin(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        answer = self._answers[update.choice]
        if isinstance(update, Progress):
            if self._job.extras.progress:
                yield self._progressed(update)
        elif isinstance(update, Delta):
            yield from self._grown(answer, update)
        else:
            answer.end = update
            for event in answer.close():
                yield from self._written(event, {})
            yield from self._ended(answer, update)

    def pause(self) -> dict[str, Any] | None:
        """Return an object that shows a waiting client that the server is working; None where a comment of the wire is enough."""
        return None

    def end(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield error.body

    def take(self, update: Update) -> None:
        if isinstance(update, Delta):
            self._answers[update.choice].take(update)
        elif isinstance(update, End):
            self._answers[update.choice].end = update

    def whole(self) -> Any:
        """Return the body of a response that is not streamed. All answers have ended."""
        raise NotImplementedError

    def _progressed(self, update: Progress) -> dict[str, Any]:
        """Return the object for the progress of a prompt that is being read."""
        raise NotImplementedError

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        """Yield the objects for new text of an answer, and add the text to the answer."""
        for place, event in answer.take(update):
            yield from self._written(event, self._beside(update, place))

    def _beside(self, update: Delta, place: int = 0) -> dict[str, Any]:
        return beside(self._job.extras, update, place)

    def _written(self, event: BlockEvent, beside: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the objects for one event of a block. beside: members to add to the object that holds the block's new text."""
        yield from ()

    def _ended(self, answer: Answer, end: End) -> Iterator[dict[str, Any]]:
        """Yield the last objects of an answer."""
        raise NotImplementedError

    def _stats(self) -> list[RequestStats]:
        """Return the statistics of the answers that have ended, in order."""
        return [answer.end.stats for answer in self._answers if answer.end is not None]

    def _measured(self) -> dict[str, Any]:
        """Return the members `timings` and `mlxspec`, which this server adds to an API's own fields."""
        stats = self._stats()
        ends = [answer.end for answer in self._answers if answer.end is not None]
        receipts = [end.receipt for end in ends if end.receipt is not None]
        return {"timings": timings(stats), "mlxspec": drafting(stats, self._job.notices, receipts)}


Read = tuple[Job, Callable[[str, Job], AnswerWriter]]  # what an API's reader makes: of the model's name


class SingleWriter(AnswerWriter):
    """A writer of a response that has exactly one answer."""

    @property
    def _answer(self) -> Answer:
        return self._answers[0]

    def whole(self) -> dict[str, Any]:
        if self._answer.end is None:
            raise RuntimeError("an answer that is whole has ended")
        return self._whole(self._answer.end)

    def _whole(self, end: End) -> dict[str, Any]:
        """Return the body of the response as one object."""
        raise NotImplementedError


class ChoicesWriter(AnswerWriter):
    """A writer of a response whose answers are its `choices`, as in OpenAI's chat completions and completions. id_prefix: the beginning
    of the response's id. kind, chunk_kind: the member `object` of a whole response and of a chunk. nothing: the members of a chunk
    without text."""

    id_prefix: str
    kind: str
    chunk_kind: str
    nothing: Mapping[str, Any]

    def __init__(self, model: str, job: Job) -> None:
        super().__init__(model, job)
        name, created = f"{self.id_prefix}{secrets.token_hex(12)}", int(time.time())
        self._head = {"id": name, "created": created, "model": model, "system_fingerprint": job.fingerprint}

    def end(self) -> Iterator[dict[str, Any]]:
        if self._job.extras.usage:
            yield {**self._head, "object": self.chunk_kind, "choices": [], **self._used()}

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": a.number,
                **self._said(a),
                **self._ids(a.number, a.tokens, has_prompt=True),
                "finish_reason": self._reason(a.end),
            }
            for a in self._answers
        ]
        return {**self._head, "object": self.kind, "choices": choices, **self._used()}

    def _said(self, answer: Answer) -> dict[str, Any]:
        """Return the members of a choice that hold a whole answer's text and its log-probabilities."""
        raise NotImplementedError

    def _ids(self, number: int, tokens: Sequence[int], *, has_prompt: bool = False) -> dict[str, Any]:
        """Return vLLM's members with token ids of answer `number`, empty where the request does not want them. tokens: the answer's ids.
        has_prompt: add the prompt's ids."""
        if not self._job.returns_ids:
            return {}
        prompt = {"prompt_token_ids": list(token_ids(self._job.asks[number].prompt))} if has_prompt else {}
        return {"token_ids": list(tokens), **prompt}

    def _reason(self, end: End | None) -> str | None:
        return None if end is None else end.reason

    def _progressed(self, update: Progress) -> dict[str, Any]:
        return self._chunk(update.choice, self.nothing) | {"prompt_progress": progress(update)}

    def _ended(self, answer: Answer, end: End) -> Iterator[dict[str, Any]]:
        is_last = len(self._stats()) == len(self._answers)
        last = self._chunk(answer.number, self.nothing, reason=self._reason(end))
        yield last | (self._measured() if is_last else {})

    def _used(self) -> dict[str, Any]:
        return {"usage": usage(self._stats(), self._job.num_prompts), **self._measured()}

    def _chunk(
        self,
        number: int,
        said: Mapping[str, Any],
        *,
        reason: str | None = None,
        logprobs: Any = None,
        tokens: Sequence[int] = (),
    ) -> dict[str, Any]:
        ids = self._ids(number, tokens) if tokens else {}
        choice = {"index": number, **said, **ids, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        return {**chunk, "usage": None} if self._job.extras.usage else chunk
