"""OpenAI's chat completions, `/v1/chat/completions`: the form of its requests and answers, how a request is read, and how an answer is
written, streamed or whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlxspec.events import TokenLogprob
from mlxspec.server.answer_format import ANY_OBJECT, AnswerFormat, answer_format
from mlxspec.server.answer_writer import ChoicesWriter, Read
from mlxspec.server.blocks import Answer, Block, BlockBegin, BlockEnd, BlockEvent, BlockMore
from mlxspec.server.errors import BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.chat import AnyPart, ChatMessage
from mlxspec.server.job import (
    ChatRequest,
    CustomGrammar,
    GoesOn,
    Job,
    TemplateMessage,
    ToolChoice,
    goes_on_with,
)
from mlxspec.server.job_run import Delta
from mlxspec.server.messages import normalize
from mlxspec.server.params import Own, chat_job, check_number, check_same, formats_of, template_variables
from mlxspec.server.prompt import Context, chat_prompt
from mlxspec.server.template_messages import custom_tool, other_tool
from mlxspec.server.usable import types_of

# --- tools and formats


class Function(t.Fields):
    name: t.ToolName
    description: t.Text | None = None
    parameters: t.Object | None = None
    strict: t.Flag = None
    harmless = t.harmless("defer_loading", "all tools are told to the model")


class ToolGrammar(t.Fields):
    syntax: Annotated[str, Field(max_length=40)] | None = None
    definition: t.Text | None = None


class CustomFormat(t.Fields):
    type: Literal["text", "grammar"] = t.optional()
    grammar: ToolGrammar | None = None


class CustomTool(t.Fields):
    name: t.ToolName
    description: t.Text | None = None
    format: CustomFormat | None = None


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
    """A choice of tools: the prompt lists all tools of the request, and the model may call these."""

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
    """A setting of thinking, in the form of GLM's, DeepSeek's and Kimi's clients."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: shared.Budget | None = None


class ReasoningAskedFor(t.Fields):
    """A setting of thinking, in the form of OpenRouter's clients."""

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


def conversation(form: ChatCompletionRequest) -> ChatRequest:
    """Return the conversation of a request, in the form that all APIs share. Raises BadField, GrammarError."""
    messages, notices, customs = normalize(form.messages), list[str](), list[CustomGrammar]()
    _take_thinking(form)
    goes_on = _goes_on(form, messages)
    return ChatRequest(
        messages=messages,
        tools=_tools(form.tools or (), notices, customs),
        tool_choice=_tool_choice(form.tool_choice),
        several_calls=form.parallel_tool_calls is not False,
        goes_on=goes_on,
        opens_answer=form.add_generation_prompt is not False,
        wanted=answer_format(formats_of(form), _wanted(form.response_format)),
        template=template_variables(form),
        notices=tuple(notices),
        customs=tuple(customs),
    )


def read(form: ChatCompletionRequest, at: Context) -> Read:
    """Return the job of a request, and the function that makes the writer of its answers from the model's name and the job. Raises
    subclasses of MlxspecError for a request that cannot be honoured."""
    check_number(form.n or 1, 1, at.limits)
    if form.top_logprobs and not form.logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs to be true.")
    prompt = chat_prompt(conversation(form), at)
    own = Own(
        max_tokens=form.max_tokens,
        stop=form.stop,
        num=form.n or 1,
        params={"logprobs": bool(form.logprobs), "top_logprobs": form.top_logprobs or 0},
        streams=bool(form.stream),
        stream_options=form.stream_options,
        returns_ids=bool(form.return_token_ids),
    )
    tools = form.tools or ()
    custom = frozenset(t.custom.name for t in tools if t.type == "custom" and t.custom is not None)
    return chat_job(form, at, prompt, own), partial(ChatWriter, custom=custom)


def _take_thinking(form: ChatCompletionRequest) -> None:
    """Copy the values of `thinking` and `reasoning` to this server's own fields of the form. Raises BadField where two fields contradict
    each other."""
    thinking, reasoning = form.thinking, form.reasoning
    found: dict[str, dict[str, Any]] = {}
    if thinking is not None:
        is_on = None if thinking.type == "auto" else thinking.type != "disabled"
        found["thinking"] = {"enable_thinking": is_on, "thinking_budget": thinking.budget_tokens}
    if reasoning is not None:
        found["reasoning"] = {
            "enable_thinking": reasoning.enabled,
            "thinking_budget": reasoning.max_tokens,
            "reasoning_effort": reasoning.effort,
        }
    for field, asked in found.items():
        for name, value in asked.items():
            if value is not None:
                check_same(getattr(form, name), name, value, field)
                setattr(form, name, value)


def _wanted(given: ResponseFormat | None) -> AnswerFormat | None:
    if given is None or given.type == "text":
        return None
    schema, is_strict = given.schema_, False
    if given.type == "json_schema":
        inner = given.json_schema
        if inner is None and schema is None:
            raise BadField("response_format.json_schema", "response_format.json_schema is missing.")
        if inner is not None:
            schema, is_strict = inner.schema_, inner.strict is True
    value = ANY_OBJECT if schema is None else schema
    return AnswerFormat(field="response_format", kind="json_schema", value=value, is_strict=is_strict)


def _tools(
    tools: Sequence[Tool], notices: list[str], customs: list[CustomGrammar]
) -> list[Mapping[str, Any]]:
    """Return the tools that the client runs, in OpenAI's nested form. A custom tool becomes a function with one text argument. notices:
    receives a sentence for each tool that is left out; customs: receives the grammars of custom tools. Raises BadField."""
    out: list[Mapping[str, Any]] = []
    for i, tool in enumerate(tools):
        if tool.type not in ("function", "custom"):
            notices.append(other_tool(f"tools[{i}]", tool.type))
        elif getattr(tool, tool.type) is None:
            raise BadField(f"tools[{i}].{tool.type}", f"tools[{i}].{tool.type} is missing.")
        elif tool.type == "function":
            out.append(t.plain(tool))
        else:
            grammar = (tool.custom.format and tool.custom.format.grammar) or ToolGrammar()
            made = custom_tool(
                tool.custom.name,
                tool.custom.description,
                f"tools[{i}].custom",
                customs,
                syntax=grammar.syntax,
                definition=grammar.definition,
            )
            out.append(made)
    return out


def _tool_choice(
    given: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
) -> ToolChoice | None:
    if given is None:
        return None
    if isinstance(given, AllowedTools):
        allowed = given.allowed_tools
        return ToolChoice(kind=allowed.mode, allowed=tuple(_chosen(tool) for tool in allowed.tools))
    if isinstance(given, NamedTool):
        return ToolChoice(kind="required", named=_chosen(given))
    return ToolChoice(kind=given)


def _chosen(tool: NamedTool) -> str:
    """Return the name of the tool in a `tool_choice`. Raises BadField where it has none."""
    named = tool.function if tool.type == "function" else tool.custom
    if named is None:
        raise BadField("tool_choice", f"tool_choice: a tool of the type {tool.type} needs its {tool.type}.")
    return named.name


def _goes_on(form: ChatCompletionRequest, messages: Sequence[TemplateMessage]) -> GoesOn | None:
    """Return which part of the last message the answer continues; None for a new message. A last message of the assistant is continued
    unless the request's fields disable this. Raises BadField for contradictory fields, and a message that cannot be continued."""
    asked = form.continue_final_message
    if asked and form.add_generation_prompt:
        raise BadField(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other."
        )
    if messages[-1]["role"] != "assistant":
        if asked:
            raise BadField(
                "continue_final_message", "continue_final_message needs a last message of the assistant's."
            )
        return None
    if asked is False or (form.add_generation_prompt is False and not asked):
        return None
    return goes_on_with(messages, f"messages[{len(form.messages) - 1}]")


class ChatWriter(ChoicesWriter):
    """A writer of chat completions. A call of a custom tool is sent when it is complete, because its text is part of a JSON string until
    then."""

    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    nothing: Mapping[str, Any] = {"delta": {}}

    def __init__(self, model: str, job: Job, *, custom: Collection[str] = ()) -> None:
        """Make the writer of a job's answers. custom: names of custom tools."""
        super().__init__(model, job)
        self._custom = custom

    def begin(self) -> Iterator[dict[str, Any]]:
        for answer in self._answers:
            yield self._chunk(answer.number, {"delta": {"role": "assistant", "content": ""}})

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        logprobs, tokens = _logprobs(update.logprobs), update.tokens
        found = [(place, self._delta(answer, event)) for place, event in answer.take(update)]
        deltas = [(place, delta) for place, delta in found if delta is not None]
        for place, delta in deltas or ([(0, {})] if logprobs or self._ids(answer.number, tokens) else []):
            chunk = self._chunk(answer.number, {"delta": delta}, logprobs=logprobs, tokens=tokens)
            yield chunk | self._beside(update, place)
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
