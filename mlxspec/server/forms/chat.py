"""OpenAI's chat completions: `/v1/chat/completions`, `/apply-template`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared

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
