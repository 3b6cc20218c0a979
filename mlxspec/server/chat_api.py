"""OpenAI's chat completions, `/v1/chat/completions`: the form of its requests and answers, how a request is read, and how an answer is
written, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlxspec.events import TokenLogprob
from mlxspec.server.answer_format import answer_format
from mlxspec.server.answer_writer import ChoicesWriter
from mlxspec.server.blocks import Answer, BlockBegin, BlockEvent, BlockMore
from mlxspec.server.chat_request import ChatRequest, GoesOn, ToolChoice, goes_on_with, template_variables
from mlxspec.server.errors import BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.job_run import Delta
from mlxspec.server.messages import normalize

# --- the conversation


class ImageUrl(shared.Detailed):
    url: shared.DataUrl


class ImageUrlPart(t.Fields):
    type: Literal["image_url"]
    image_url: ImageUrl
    harmless = shared.TextBlock.harmless


class CalledFunction(t.Fields):
    name: t.Name
    arguments: t.Text | t.Object = Field(description="a JSON object; what is none is passed on as text")


class ToolCall(t.Fields):
    id: t.Id = t.optional()
    type: Literal["function"] = t.optional()
    function: CalledFunction
    harmless = t.harmless("index", "the place of a streamed call, sent back")


class ChatMessage(t.Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        t.Text | t.Many[Annotated[shared.TextBlock | ImageUrlPart, Field(discriminator="type")]] | None
    ) = None
    name: t.Id | None = None
    tool_call_id: t.Id | None = None
    tool_calls: t.Tools[ToolCall] | None = None
    reasoning_content: t.Text | None = None
    reasoning: t.Text | None = None
    refused = t.refuse("function_call", "use tool_calls") | t.refuse("audio", shared.TEXT_ONLY)
    harmless: ClassVar = {
        **shared.CACHE,
        **t.harmless("prefix", "an answer goes on with a last message of the assistant's anyway"),
        **t.harmless("refusal annotations", shared.UNREAD),
    }


# --- tools and formats


class Function(t.Fields):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: t.Text | None = None
    parameters: t.Object | None = None
    strict: t.Flag = None
    harmless = t.harmless("defer_loading", "all tools are told to the model")


class Tool(t.Fields):
    type: Literal["function"]
    function: Function
    harmless = shared.CACHE | Function.harmless


class NamedFunction(t.Fields):
    name: t.Name


class NamedTool(t.Fields):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(t.Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[t.Tools[NamedTool], Field(min_length=1)]


class AllowedTools(t.Fields):
    """The model is told of all tools, and may call these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class JsonSchema(t.Fields):
    name: t.Id | None = None
    description: t.Text | None = None
    schema_: t.Object = Field(alias="schema")
    strict: t.Flag = None


class ResponseFormat(t.Fields):
    type: Literal["text", "json_object", "json_schema"]
    schema_: t.Object | None = t.optional(name="schema")
    json_schema: JsonSchema = t.optional()


# --- the request


class ChatCompletionRequest(shared.Continued, shared.ThinkingFields):
    messages: Annotated[t.Turns[ChatMessage], Field(min_length=1)]
    stream_options: shared.StreamOptions | None = None
    add_generation_prompt: t.Flag = t.optional("false: the prompt ends behind the last message")
    continue_final_message: t.Flag = t.optional(
        "the answer goes on with the last message, the assistant's; so it does unless this is false"
    )
    return_token_ids: t.Flag = t.optional("token ids beside each answer")
    logprobs: t.Flag = None
    top_logprobs: Annotated[int, t.option("top_logprobs")] | None = None
    response_format: ResponseFormat | None = None
    tools: t.Tools[Tool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: t.Flag = None
    modalities: t.Many[Literal["text"]] | None = None
    # /v1/completions honours a field of this name; a chat's is vLLM's, and means another thing
    refused = shared.REFUSED | t.refuse("echo", "the message that is continued is not repeated", *t.OFF)


# --- the answer

_TOKEN: dict[str, Any] = {"token": str, "logprob": float, "bytes": list[Annotated[int, Field(ge=0, le=255)]]}
_Logprobs = t.answer(
    "Logprobs", refusal=None,
    content=t.many(t.answer("TokenLogprob", **_TOKEN, top_logprobs=t.many(t.answer("TopLogprob", **_TOKEN)))),
)  # fmt: skip
_Call = t.answer(
    "AnsweredCall", id=str, type=Literal["function"], function=t.answer("AnsweredFunction", name=str, arguments=str)
)  # fmt: skip
_Message = t.answer(
    "AnsweredMessage", "reasoning_content reasoning tool_calls",
    role=Literal["assistant"], content=str | None, refusal=None, reasoning_content=str, reasoning=str, tool_calls=t.many(_Call),
)  # fmt: skip
_Choice = t.answer(
    "ChatChoice", "token_ids prompt_token_ids",
    token_ids=list[shared.Count], prompt_token_ids=list[shared.Count], index=int, message=_Message,
    logprobs=t.either(_Logprobs, None), finish_reason=Literal["stop", "length", "tool_calls"]
)  # fmt: skip
ChatAnswer = t.answer(
    "ChatAnswer",
    **shared.HEAD,
    object=Literal["chat.completion"],
    choices=t.many(_Choice),
    usage=shared.Usage,
    **shared.MEASURED,
)


# --- reading and writing

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
