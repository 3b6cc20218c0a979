"""/api/chat and /api/generate: reads requests of Ollama's API, and writes answers as its objects, one a line or one in all."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.server.answer_format import ANY_OBJECT, AnswerFormat, answer_format
from mlxspec.server.blocks import Block, BlockEnd, BlockEvent, BlockMore, Blocks
from mlxspec.server.chat_request import ChatRequest, goes_on_with, template_variables
from mlxspec.server.error_forms import ollama_error
from mlxspec.server.errors import ApiError, BadField
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.messages import normalize
from mlxspec.server.protocol import LINES, AnswerProtocol
from mlxspec.server.usage import Extras, drafting, progress, timings

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats

_NANO = 10**9


def ollama_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Of a checked body of /api/chat with messages. Raises BadField, GrammarError."""
    messages = _conversation(body["messages"])
    return _request(body, messages, tools=body.get("tools") or ())


def ollama_prompt_request(body: Mapping[str, Any]) -> ChatRequest:
    """Of a checked body of /api/generate with a prompt that is not raw. Raises BadField, GrammarError."""
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return _request(body, [*system, {"role": "user", "content": body["prompt"]}])


def raw_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """A checked body of /api/generate whose prompt is raw, as one of /v1/completions. Raises BadField."""
    for name in ("system", "think"):
        if body.get(name):
            raise BadField(name, f"{name} and raw exclude each other: a raw prompt has no template.")
    wanted = _format(body)
    formats: dict[str, Any] = {} if wanted is None else {str(wanted.kind): wanted.value}
    return {**options_of(body), **formats, "prompt": body["prompt"]}


def options_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a checked body, under the names of all APIs."""
    options = dict(body.get("options") or {})
    num = options.pop("num_predict", None)
    return {**options, "max_tokens": {0: None, -2: -1}.get(num, num)}


def context_notice(body: Mapping[str, Any], max_context: int) -> tuple[str, ...]:
    """What to say where a request asks for a longer context than there is."""
    asked = (body.get("options") or {}).get("num_ctx") or 0
    if asked <= max_context:
        return ()
    return (f"options.num_ctx is {asked}, and this model's context ends at {max_context} tokens",)


def _request(
    body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> ChatRequest:
    return ChatRequest(
        messages=messages,
        tools=[{**tool, "type": "function"} for tool in tools],
        goes_on=goes_on_with(messages, f"messages[{len(messages) - 1}]"),
        template=_template(body),
        wanted=_format(body),
        options=options_of(body),
    )


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In this API calls have no ids, and a result names its tool. Raises BadField."""
    named = []
    for message in messages:
        calls = [
            {**c, "function": {"arguments": {}, **_without_null(c["function"])}}
            for c in message.get("tool_calls") or ()
        ]
        out = {**message, "tool_calls": calls or None, "reasoning_content": message.get("thinking")}
        if message["role"] == "tool":
            out["name"] = message.get("tool_name")
        named.append(out)
    return normalize(named)


def _without_null(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if member is not None}


def _template(body: Mapping[str, Any]) -> dict[str, Any]:
    found = template_variables(body)
    think = body.get("think")
    if think is None:
        return found
    if body.get("enable_thinking") not in (None, think is not False):
        raise BadField("think", "think and enable_thinking contradict each other.")
    found["enable_thinking"] = think is not False
    return found if isinstance(think, bool) else {**found, "reasoning_effort": think}


def _format(body: Mapping[str, Any]) -> AnswerFormat | None:
    found = answer_format(body.get("options") or {})
    wanted = body.get("format")
    if not wanted and not isinstance(wanted, dict):
        return found
    if found is not None:
        raise BadField("format", f"options.{found.field} and format both say what the answer looks like.")
    return AnswerFormat(field="format", kind="json_schema", value=ANY_OBJECT if wanted == "json" else wanted)


class OllamaProtocol(AnswerProtocol):
    """One answer. Its stream is objects with pieces of text or thinking or a whole call, and a last one with `done` true and what it
    took.

    is_chat: of /api/chat; else of /api/generate. Extensions: `timings` and `mlxspec` in the last object, `prompt_progress` in one of its
    own.
    """

    wire = LINES

    def __init__(
        self, model: str, *, is_chat: bool, extras: Extras | None = None, notices: Sequence[str] = ()
    ) -> None:
        self._model, self._is_chat = model, is_chat
        self._wanted, self._notices = extras or Extras(), tuple(notices)
        self._blocks = Blocks()
        self._started = time.monotonic()
        self._end: End | None = None

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        if isinstance(update, Progress):
            if self._wanted.progress:
                yield self._object("", done=False) | {"prompt_progress": progress(update)}
        elif isinstance(update, Delta):
            for place, piece in enumerate(update.pieces):
                beside = self._wanted.beside(update, place)
                for event in self._blocks.push([piece]):
                    yield from self._event(event, beside)
        else:
            for event in self._blocks.close():
                yield from self._event(event, {})
            yield self._object("", done=True) | self._last(update)

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield ollama_error(error)

    def take(self, update: Update) -> None:
        if isinstance(update, Delta):
            for _ in self._blocks.push(update.pieces):
                pass
        elif isinstance(update, End):
            self._end = update

    def whole(self) -> dict[str, Any]:
        if self._end is None:
            raise RuntimeError("an answer that is whole has ended")
        blocks = self._blocks
        found = self._object(
            blocks.text("text"), thinking=blocks.text("thinking"), calls=blocks.calls, done=True
        )
        return found | self._last(self._end)

    def loaded(self) -> dict[str, Any]:
        """The answer to a request that asks for nothing but the model."""
        return self._object("", done=True) | {"done_reason": "load"}

    def _event(self, event: BlockEvent, timed: dict[str, Any]) -> Iterator[dict[str, Any]]:
        block = event.block
        if block.kind == "call":
            if isinstance(event, BlockEnd):
                yield self._object("", calls=[block], done=False)
        elif isinstance(event, BlockMore):
            if block.kind == "text":
                yield self._object(event.text, done=False) | timed
            else:
                yield self._object("", thinking=event.text, done=False) | timed

    def _object(
        self, text: str, *, thinking: str = "", calls: Sequence[Block] = (), done: bool
    ) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC)
        head = {"model": self._model, "created_at": now.isoformat(timespec="microseconds")}
        inner: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            inner["tool_calls"] = [
                {"id": c.call_id, "function": {"name": c.name, "arguments": c.arguments()}} for c in calls
            ]
        if self._is_chat:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text, **inner}}
        else:
            said = {"response": text, **inner}
        return {**head, **said, "done": done}

    def _last(self, end: End) -> dict[str, Any]:
        stats: RequestStats = end.stats
        return {
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": int((time.monotonic() - self._started) * _NANO),
            "load_duration": 0,
            "prompt_eval_count": stats.num_prompt,
            "prompt_eval_duration": int(stats.prefill_seconds * _NANO),
            "eval_count": stats.num_generated,
            "eval_duration": int(stats.decode_seconds * _NANO),
            "timings": timings([stats]),
            "mlxspec": drafting([stats], self._notices),
        }
