"""/v1/chat/completions: reads requests of OpenAI's chat protocol, and writes answers as its objects, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxspec.events import TokenLogprob
from mlxspec.server.answer_format import answer_format
from mlxspec.server.answer_writer import ChoicesWriter
from mlxspec.server.blocks import Answer, BlockBegin, BlockEvent, BlockMore
from mlxspec.server.chat_request import ChatRequest, GoesOn, ToolChoice, goes_on_with, template_variables
from mlxspec.server.errors import BadField
from mlxspec.server.job_run import Delta
from mlxspec.server.messages import normalize

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
    if isinstance(given, Mapping) and given["type"] == "allowed_tools":
        allowed = given["allowed_tools"]
        names = tuple(tool["function"]["name"] for tool in allowed["tools"])
        return ToolChoice(kind=allowed["mode"], allowed=names)
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


class ChatWriter(ChoicesWriter):
    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    nothing: Mapping[str, Any] = {"delta": {}}

    def begin(self) -> Iterator[dict[str, Any]]:
        for answer in self._answers:
            yield self._chunk(answer.number, {"delta": {"role": "assistant", "content": ""}})

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        logprobs, tokens = _logprobs(update.logprobs), update.tokens
        found = [(place, _delta(answer, event)) for place, event in answer.take(update)]
        deltas = [(place, delta) for place, delta in found if delta is not None]
        for place, delta in deltas or ([(0, {})] if logprobs or self._ids(answer.number, tokens) else []):
            chunk = self._chunk(answer.number, {"delta": delta}, logprobs=logprobs, tokens=tokens)
            yield chunk | self._wanted.beside(update, place)
            logprobs, tokens = None, ()

    def _said(self, answer: Answer) -> dict[str, Any]:
        content, reasoning = answer.text("text"), answer.text("thinking")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls = [_call(b.call_id, b.name, b.text) for b in answer.calls]
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {"message": message, "logprobs": _logprobs(answer.logprobs)}


def _delta(answer: Answer, event: BlockEvent) -> dict[str, Any] | None:
    block = event.block
    if block.kind == "call":
        number = answer.calls.index(block)
        if isinstance(event, BlockBegin):
            return {"tool_calls": [{"index": number, **_call(block.call_id, block.name, "")}]}
        if isinstance(event, BlockMore):
            return {"tool_calls": [{"index": number, "function": {"arguments": event.text}}]}
    elif isinstance(event, BlockMore):
        if block.kind == "text":
            return {"content": event.text}
        return {"reasoning_content": event.text, "reasoning": event.text}
    return None


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    content = [
        {**_entry(t.logprob, t.data), "top_logprobs": [_entry(o.logprob, o.data) for o in t.top]}
        for t in found
    ]
    return {"content": content, "refusal": None} if content else None


def _entry(logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": data.decode("utf-8", errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
