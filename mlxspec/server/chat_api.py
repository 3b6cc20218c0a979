"""OpenAI's chat completions, `/v1/chat/completions`: the form of its requests and answers, how a request is read, and how an answer is
written, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlxspec.events import TokenLogprob
from mlxspec.server.answer_format import answer_format
from mlxspec.server.answer_writer import ChoicesWriter
from mlxspec.server.blocks import Answer, Block, BlockBegin, BlockEnd, BlockEvent, BlockMore
from mlxspec.server.chat_request import (
    ChatRequest,
    CustomGrammar,
    GoesOn,
    ToolChoice,
    check_same,
    goes_on_with,
    template_variables,
)
from mlxspec.server.errors import BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.job_run import Delta
from mlxspec.server.messages import normalize
from mlxspec.server.request_parsing import Job
from mlxspec.server.template_messages import custom_tool, other_tool
from mlxspec.server.usable import types_of

# --- the conversation


class ImageUrl(shared.Detailed):
    url: shared.DataUrl


class ImageUrlPart(t.Fields):
    type: Literal["image_url"]
    image_url: ImageUrl
    harmless = shared.TextBlock.harmless


class OtherText(t.Fields):
    """A part of the Responses API's."""

    type: Literal["input_text", "output_text"]
    text: t.Text
    harmless = shared.TextBlock.harmless | t.harmless("logprobs", shared.UNREAD)


class RefusalPart(t.Fields):
    type: Literal["refusal"]
    refusal: t.Text
    harmless = shared.TextBlock.harmless | t.harmless("logprobs", shared.UNREAD)


class ThoughtPart(t.LeftOut):
    """Reasoning as a part of an answer, as Mistral's and LangChain's clients send it: `reasoning_content`."""

    type: Literal["thinking", "reasoning"]
    thinking: t.Text | t.Many[shared.TextBlock] | None = None
    reasoning: t.Text | None = None
    text: t.Text | None = None


AnyPart = Annotated[
    shared.TextBlock | ImageUrlPart | OtherText | RefusalPart | ThoughtPart, Field(discriminator="type")
]


class CalledFunction(t.Fields):
    name: t.Name
    arguments: t.Text | t.Object = Field(description="a JSON object; what is none is passed on as text")


class CalledCustom(t.Fields):
    name: t.Name
    input: t.Text


class ToolCall(t.Fields):
    id: t.Id = t.optional()
    type: Literal["function", "custom"] = t.optional()
    function: CalledFunction = t.optional()
    custom: CalledCustom = t.optional("of a custom tool: a call of a function with one text, `input`")
    harmless = t.harmless("index", "the place of a streamed call, sent back")


class ChatMessage(t.Fields):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: t.Text | t.Many[AnyPart] | None = None
    name: t.Id | None = None
    tool_call_id: t.Id | None = None
    tool_calls: t.Tools[ToolCall] | None = None
    reasoning_content: t.Text | None = None
    reasoning: t.Text | None = None
    function_call: CalledFunction | None = t.optional("a call in the form before tool_calls")
    harmless: ClassVar = {
        **shared.CACHE,
        **t.harmless("prefix", "an answer goes on with a last message of the assistant's anyway"),
        **t.harmless("refusal annotations", shared.UNREAD),
        **t.harmless("audio", "the identifier of an answer that was spoken; its text stands in content"),
    }


# --- tools and formats


class Function(t.Fields):
    name: t.ToolName
    description: t.Text | None = None
    parameters: t.Object | None = None
    strict: t.Flag = None
    harmless = t.harmless("defer_loading", "all tools are told to the model")


class CustomTool(t.Fields):
    name: t.ToolName
    description: t.Text | None = None
    format: dict[str, Any] | None = t.optional("text, or grammar with grammar.syntax and grammar.definition")


class Tool(t.Fields):
    type: t.Id = Field(
        description="function or custom; tools of other types, which the provider runs, are left out"
    )
    function: Function = t.optional()
    custom: CustomTool = t.optional()
    harmless = shared.CACHE | Function.harmless


class NamedFunction(t.Fields):
    name: t.Name


class NamedTool(t.Fields):
    type: Literal["function", "custom"]
    function: NamedFunction = t.optional()
    custom: NamedFunction = t.optional()


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


class ThinkingAskedFor(t.Fields):
    """The form of GLM's, DeepSeek's and Kimi's clients."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: shared.Budget | None = None


class ReasoningAskedFor(t.Fields):
    """The form of OpenRouter's clients."""

    effort: shared.Effort | None = None
    max_tokens: shared.Budget | None = None
    enabled: t.Flag = None
    harmless = t.harmless("exclude summary", "reasoning comes beside the answer, as reasoning_content")


class ChatCompletionRequest(shared.Continued, shared.ThinkingFields):
    parts: ClassVar = types_of(AnyPart)
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
    thinking: ThinkingAskedFor | None = t.optional("another form of enable_thinking and thinking_budget")
    reasoning: ReasoningAskedFor | None = t.optional("another form of the same, and of reasoning_effort")
    tools: t.Tools[Tool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: t.Flag = None
    modalities: t.Many[Literal["text"]] | None = None
    # /v1/completions honours a field of this name; a chat's is vLLM's, and means another thing
    refused: ClassVar = {
        **{name: why for name, why in shared.REFUSED.items() if name not in ("thinking", "reasoning")},
        **t.refuse("echo", "the message that is continued is not repeated", *t.OFF),
    }


# --- the answer

_TOKEN: dict[str, Any] = {"token": str, "logprob": float, "bytes": list[Annotated[int, Field(ge=0, le=255)]]}
_Logprobs = t.answer(
    "Logprobs", refusal=None,
    content=t.many(t.answer("TokenLogprob", **_TOKEN, top_logprobs=t.many(t.answer("TopLogprob", **_TOKEN)))),
)  # fmt: skip
_Call = t.answer(
    "AnsweredCall", id=str, type=Literal["function"], function=t.answer("AnsweredFunction", name=str, arguments=str)
)  # fmt: skip
_CustomCall = t.answer(
    "AnsweredCustomCall", id=str, type=Literal["custom"], custom=t.answer("AnsweredCustom", name=str, input=str)
)  # fmt: skip
_Calls = t.either(_Call, _CustomCall)
_Message = t.answer(
    "AnsweredMessage", "reasoning_content reasoning tool_calls",
    role=Literal["assistant"], content=str | None, refusal=None, reasoning_content=str, reasoning=str, tool_calls=t.many(_Calls),
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
    messages, notices, customs = normalize(body["messages"]), list[str](), list[CustomGrammar]()
    body = _with_thinking(body)
    return ChatRequest(
        messages=messages,
        tools=_tools(body.get("tools") or (), notices, customs),
        tool_choice=_tool_choice(body.get("tool_choice")),
        several_calls=body.get("parallel_tool_calls") is not False,
        goes_on=_goes_on(body, messages),
        opens_answer=body.get("add_generation_prompt") is not False,
        template=template_variables(body),
        wanted=answer_format(body),
        options=body,
        logprobs=bool(body.get("logprobs")),
        top_logprobs=body.get("top_logprobs") or 0,
        notices=tuple(notices),
        customs=tuple(customs),
    )


def _with_thinking(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with what `thinking` and `reasoning` ask for under this server's names. Raises BadField."""
    thinking, reasoning = body.get("thinking") or {}, body.get("reasoning") or {}
    kind = thinking.get("type")
    found = {
        "thinking": {
            "enable_thinking": None if kind in (None, "auto") else kind != "disabled",
            "thinking_budget": thinking.get("budget_tokens"),
        },
        "reasoning": {
            "enable_thinking": reasoning.get("enabled"),
            "thinking_budget": reasoning.get("max_tokens"),
            "reasoning_effort": reasoning.get("effort"),
        },
    }
    for field, asked in found.items():
        for name, value in asked.items():
            if value is not None:
                check_same(body, name, value, field)
                body = {**body, name: value}
    return body


def _tools(
    tools: Sequence[Mapping[str, Any]], notices: list[str], customs: list[CustomGrammar]
) -> list[Mapping[str, Any]]:
    """The tools that a client runs; a custom one is a function with one text. Raises BadField."""
    out: list[Mapping[str, Any]] = []
    for i, tool in enumerate(tools):
        kind = tool["type"]
        if kind not in ("function", "custom"):
            notices.append(other_tool(f"tools[{i}]", kind))
        elif kind not in tool:
            raise BadField(f"tools[{i}].{kind}", f"tools[{i}].{kind} is missing.")
        elif kind == "function":
            out.append(tool)
        else:
            form = tool["custom"].get("format") or {}
            out.append(custom_tool(tool["custom"], form.get("grammar") or {}, f"tools[{i}].custom", customs))
    return out


def _tool_choice(given: Any) -> ToolChoice | None:
    if given is None:
        return None
    if isinstance(given, Mapping) and given["type"] == "allowed_tools":
        allowed = given["allowed_tools"]
        names = tuple(_chosen(tool) for tool in allowed["tools"])
        return ToolChoice(kind=allowed["mode"], allowed=names)
    if isinstance(given, Mapping):
        return ToolChoice(kind="required", named=_chosen(given))
    return ToolChoice(kind=given)


def _chosen(tool: Mapping[str, Any]) -> str:
    """The name of a tool that a choice names. Raises BadField."""
    if tool["type"] not in tool:
        raise BadField(
            "tool_choice", f"tool_choice: a tool of the type {tool['type']} needs its {tool['type']}."
        )
    return str(tool[tool["type"]]["name"])


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
    """Calls of custom tools are given when they are complete: their text stands inside of JSON until then."""

    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    nothing: Mapping[str, Any] = {"delta": {}}

    def __init__(self, model: str, body: Mapping[str, Any], job: Job) -> None:
        super().__init__(model, body, job)
        tools = body.get("tools") or ()
        self._custom = {t["custom"]["name"] for t in tools if t["type"] == "custom" and "custom" in t}

    def begin(self) -> Iterator[dict[str, Any]]:
        for answer in self._answers:
            yield self._chunk(answer.number, {"delta": {"role": "assistant", "content": ""}})

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        logprobs, tokens = _logprobs(update.logprobs), update.tokens
        found = [(place, self._delta(answer, event)) for place, event in answer.take(update)]
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
        calls = [self._call(b) for b in answer.calls]
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {"message": message, "logprobs": _logprobs(answer.logprobs)}

    def _written(self, event: BlockEvent, beside: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        answer = next(a for a in self._answers if any(b is event.block for b in a.blocks))
        delta = self._delta(answer, event)
        if delta is not None:
            yield self._chunk(answer.number, {"delta": delta}) | dict(beside)

    def _delta(self, answer: Answer, event: BlockEvent) -> dict[str, Any] | None:
        block = event.block
        if block.kind == "call":
            head, is_custom = {"index": answer.calls.index(block)}, block.name in self._custom
            if isinstance(event, BlockEnd):
                return {"tool_calls": [head | self._call(block)]} if is_custom else None
            if is_custom:
                return None
            if isinstance(event, BlockBegin):
                return {"tool_calls": [head | self._call(replace(block, text=""))]}
            return {"tool_calls": [head | {"function": {"arguments": event.text}}]}
        if isinstance(event, BlockMore):
            if block.kind == "text":
                return {"content": event.text}
            return {"reasoning_content": event.text, "reasoning": event.text}
        return None

    def _call(self, block: Block) -> dict[str, Any]:
        head = {"id": block.call_id, "type": "function"}
        if block.name not in self._custom:
            return {**head, "function": {"name": block.name, "arguments": block.text}}
        return {**head, "type": "custom", "custom": {"name": block.name, "input": block.custom_input()}}


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
