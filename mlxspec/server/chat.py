"""/v1/chat/completions: reads requests of OpenAI's chat protocol, and writes answers as its objects, streamed or whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.events import TokenLogprob
from mlxspec.server.answer_format import answer_format
from mlxspec.server.blocks import BlockBegin, BlockEvent, BlockMore, Blocks
from mlxspec.server.chat_request import ChatRequest, GoesOn, ToolChoice, goes_on_with, template_variables
from mlxspec.server.errors import BadField
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.messages import normalize
from mlxspec.server.protocol import AnswerProtocol
from mlxspec.server.usage import Extras, drafting, progress, timings, usage

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats

_LEAST = -9999.0  # JSON has no infinity


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Of a checked body, under the fields' own names. Raises BadField, GrammarError."""
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadField("top_logprobs", "top_logprobs needs logprobs to be true.")
    messages = normalize(body["messages"])
    return ChatRequest(
        messages=messages,
        tools=body.get("tools") or (),
        tool_choice=_tool_choice(body.get("tool_choice")),
        several_calls=body.get("parallel_tool_calls") is not False,
        goes_on=_goes_on(body, messages),
        opens_answer=body.get("add_generation_prompt") is not False,
        template=template_variables(body),
        wanted=answer_format(body),
        options=body,
        logprobs=bool(body.get("logprobs")),
        top_logprobs=body.get("top_logprobs") or 0,
    )


def _tool_choice(given: Any) -> ToolChoice | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return ToolChoice(kind="required", named=given["function"]["name"])
    return ToolChoice(kind=given)


def _goes_on(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> GoesOn | None:
    """A last message of the assistant's is continued unless the request says otherwise. Raises BadField."""
    asked = body.get("continue_final_message")
    if asked and body.get("add_generation_prompt"):
        raise BadField(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other."
        )
    if messages[-1]["role"] != "assistant":
        if asked:
            raise BadField(
                "continue_final_message", "continue_final_message needs a last message of the assistant's."
            )
        return None
    if asked is False or (body.get("add_generation_prompt") is False and not asked):
        return None
    return goes_on_with(messages, f"messages[{len(body['messages']) - 1}]")


class ChatProtocol(AnswerProtocol):
    """One response. extras: what chunks hold beside text."""

    def __init__(
        self,
        model: str,
        num_choices: int,
        *,
        fingerprint: str,
        extras: Extras | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._choices = [_Choice(i) for i in range(num_choices)]
        self._wanted = extras or Extras()
        self._notices = tuple(notices)
        self._stats: dict[int, RequestStats] = {}

    def begin(self) -> Iterator[dict[str, Any]]:
        for choice in self._choices:
            yield self._chunk(choice.number, {"role": "assistant", "content": ""})

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        """What to send for one update."""
        if isinstance(update, Delta):
            choice = self._choices[update.choice]
            logprobs = _logprobs(update.logprobs)
            for place, delta in choice.deltas(update) or ([(0, {})] if logprobs else []):
                beside = self._wanted.beside(update, place)
                yield self._chunk(choice.number, delta, logprobs=logprobs) | beside
                logprobs = None
        elif isinstance(update, Progress):
            if self._wanted.progress:
                yield self._chunk(update.choice, {}) | {"prompt_progress": progress(update)}
        elif isinstance(update, End):
            self._stats[update.choice] = update.stats
            last = self._chunk(update.choice, {}, reason=update.reason)
            if len(self._stats) == len(self._choices):
                last |= self._extras()
            yield last

    def end(self) -> Iterator[dict[str, Any]]:
        if self._wanted.usage:
            stats = self._all_stats()
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
            yield {**chunk, "usage": usage(stats, 1), **self._extras()}

    def take(self, update: Update) -> None:
        """Remember, for `whole`."""
        if isinstance(update, Delta):
            self._choices[update.choice].take(update)
        elif isinstance(update, End):
            self._stats[update.choice] = update.stats
            self._choices[update.choice].reason = update.reason

    def whole(self) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [c.message() for c in self._choices],
            "usage": usage(self._all_stats(), 1),
            **self._extras(),
        }

    def _all_stats(self) -> list[RequestStats]:
        return [self._stats[i] for i in sorted(self._stats)]

    def _extras(self) -> dict[str, Any]:
        stats = self._all_stats()
        return {"timings": timings(stats), "mlxspec": drafting(stats, self._notices)}

    def _chunk(
        self, number: int, delta: dict[str, Any], *, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._wanted.usage else chunk


class _Choice:
    """One answer as it grows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reason: str | None = None
        self._blocks = Blocks()
        self._logprobs: list[dict[str, Any]] | None = None

    def deltas(self, update: Delta) -> list[tuple[int, dict[str, Any]]]:
        """Each with the number of the piece that it is of."""
        found = (
            (place, self._delta(event))
            for place, piece in enumerate(update.pieces)
            for event in self._blocks.push([piece])
        )
        return [(place, delta) for place, delta in found if delta is not None]

    def _delta(self, event: BlockEvent) -> dict[str, Any] | None:
        block = event.block
        if block.kind == "call":
            number = self._blocks.calls.index(block)
            if isinstance(event, BlockBegin):
                return {"tool_calls": [{"index": number, **_call(block.call_id, block.name, "")}]}
            if isinstance(event, BlockMore):
                return {"tool_calls": [{"index": number, "function": {"arguments": event.text}}]}
        elif isinstance(event, BlockMore):
            if block.kind == "text":
                return {"content": event.text}
            return {"reasoning_content": event.text, "reasoning": event.text}
        return None

    def take(self, update: Delta) -> None:
        for _ in self._blocks.push(update.pieces):
            pass
        if update.logprobs:
            self._logprobs = (self._logprobs or []) + _entries(update.logprobs)

    def message(self) -> dict[str, Any]:
        content, reasoning = self._blocks.text("text"), self._blocks.text("thinking")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls = [_call(b.call_id, b.name, b.text) for b in self._blocks.calls]
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {
            "index": self.number,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.reason,
        }


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": _entries(found), "refusal": None} if found else None


def _entries(found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {**_entry(t.logprob, t.data), "top_logprobs": [_entry(o.logprob, o.data) for o in t.top]}
        for t in found
    ]


def _entry(logprob: float, data: bytes) -> dict[str, Any]:
    return {
        "token": data.decode("utf-8", errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }


def finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
