"""Anthropic's Messages: `/v1/messages`, `/v1/messages/count_tokens`.

Fields that all APIs share stand beside them under their usual names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.chat import ChatMessage, Tool
from mlxspec.server.forms.shared import Count

# --- blocks


class MessageBlock(t.Fields):
    harmless = shared.TextBlock.harmless | t.harmless("caller", "tools are called by the model only")


class ImageFile(t.Fields):
    type: Literal["base64", "url"]
    media_type: str | None = t.optional("not read: the file tells")
    data: shared.Base64 = t.optional()
    url: shared.DataUrl = t.optional()


class ImageBlock(MessageBlock, shared.Sized):
    type: Literal["image"]
    source: ImageFile


class ToolUse(MessageBlock):
    type: Literal["tool_use"]
    id: t.Id
    name: t.Name
    input: t.Object


class TextSource(t.Fields):
    type: Literal["text"]
    media_type: str | None = t.optional("not read")
    data: t.Text


class ContentSource(t.Fields):
    type: Literal["content"]
    content: t.Text | t.Many[shared.TextBlock]


class Document(MessageBlock):
    """Of text; it is given to the model as text."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: t.Text | None = None
    context: t.Text | None = None


class SearchResult(MessageBlock):
    """It is given to the model as text."""

    type: Literal["search_result"]
    source: t.Text
    title: t.Text
    content: t.Many[shared.TextBlock]


class ToolReference(MessageBlock):
    """A tool that the client has found: all tools are told to the model anyway."""

    type: Literal["tool_reference"]
    tool_name: t.Name


class ToolResult(MessageBlock):
    type: Literal["tool_result"]
    tool_use_id: t.Id
    content: (
        t.Text
        | t.Many[
            Annotated[
                shared.TextBlock | ImageBlock | Document | SearchResult | ToolReference,
                Field(discriminator="type"),
            ]
        ]
        | None
    ) = None
    is_error: t.Flag = None


class Thought(MessageBlock):
    type: Literal["thinking"]
    thinking: t.Text
    signature: str | None = t.optional("not read")


class RedactedThought(MessageBlock):
    type: Literal["redacted_thinking"]
    data: str = t.optional("not read: nothing here can decrypt it")


class Compaction(MessageBlock):
    """A summary in place of all messages before it."""

    type: Literal["compaction"]
    content: t.Text | None = None
    harmless: ClassVar = MessageBlock.harmless | t.harmless(
        "encrypted_content signature tool_changes", shared.UNREAD
    )


class OtherBlock(t.LeftOut):
    type: Literal[
        "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result", "code_execution_tool_result",
        "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result", "mcp_tool_use",
        "mcp_tool_result", "mcp_tool_listing", "tool_addition", "tool_removal", "fallback",
    ]  # fmt: skip


AnyBlock = Annotated[
    shared.TextBlock
    | ImageBlock
    | ToolUse
    | ToolResult
    | Thought
    | RedactedThought
    | Document
    | SearchResult
    | Compaction
    | OtherBlock,
    Field(discriminator="type"),
]


class Message(t.Fields):
    role: Literal["user", "assistant", "system"]
    content: t.Text | t.Many[AnyBlock]
    refused = ChatMessage.refused
    harmless = ChatMessage.harmless


# --- tools, thinking, format


class ClientTool(t.Fields):
    type: t.Id | None = t.optional(
        "`custom`; tools of other types, which the provider runs or describes, are left out"
    )
    name: t.ToolName
    description: t.Text | None = None
    input_schema: t.Object = t.optional()
    strict: t.Flag = None
    harmless: ClassVar = {
        **Tool.harmless,
        **t.harmless("eager_input_streaming", "arguments are always streamed while they are written"),
        **t.harmless("allowed_callers", "tools are called by the model only"),
    }


class MayCall(t.Fields):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: t.Flag = None


class MustCall(t.Fields):
    type: Literal["tool"]
    name: t.Name
    disable_parallel_tool_use: t.Flag = None


class CallsNothing(t.Fields):
    type: Literal["none"]


class ThinkingOn(t.Fields):
    type: Literal["enabled"]
    budget_tokens: shared.Budget | None = None
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(t.Fields):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingOff(t.Fields):
    type: Literal["disabled"]


class OutputFormat(t.Fields):
    type: Literal["json_schema"]
    schema_: t.Object = Field(alias="schema")


class OutputConfig(t.Fields):
    effort: shared.Effort | None = None
    format: OutputFormat | None = None


# --- the request

_NO_LOGPROBS = "has no place for log-probabilities; /v1/chat/completions has"


class CountTokensRequest(shared.Body, shared.ThinkingFields):
    messages: Annotated[t.Turns[Message], Field(min_length=1)]
    system: t.Text | t.Many[shared.TextBlock] | None = None
    tools: t.Tools[ClientTool] | None = None
    tool_choice: Annotated[MayCall | MustCall | CallsNothing, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")] | None = (
        None
    )
    output_config: OutputConfig | None = None
    refused: ClassVar = {
        **shared.one_answer("message", _NO_LOGPROBS, "message"),
        **t.refuse("stop", "use stop_sequences", *t.OFF),
        **t.refuse("n_predict max_completion_tokens", "use max_tokens"),
        **t.refuse("stream_options", "usage always comes in a stream", *t.OFF),
        **t.refuse("response_format output_format", "use output_config.format"),
        **t.refuse("parallel_tool_calls", "use tool_choice.disable_parallel_tool_use", True),
        **t.refuse("mcp_servers", "this server calls no other servers", *t.OFF),
        **t.refuse("container", "this server runs no tools"),
    }
    harmless: ClassVar = {
        **shared.HARMLESS,
        **shared.CACHE,
        **t.harmless("inference_geo speed", "there is one machine"),
        **t.harmless("anthropic_version anthropic_beta", "there is one version"),
        **t.harmless("user_profile_id", "bookkeeping of the client's"),
    }


class MessagesRequest(CountTokensRequest, shared.Generation):
    max_tokens: shared.Length | None = Field(description="-1: to the context's end")
    stream: t.Flag = None
    stop_sequences: shared.Words | None = None


# --- the answer

_Text = t.answer("AnsweredText", type=Literal["text"], text=str)
_Thought = t.answer("AnsweredThought", type=Literal["thinking"], thinking=str, signature=str)
_ToolUse = t.answer("AnsweredToolUse", type=Literal["tool_use"], id=str, name=str, input=dict[str, Any])
_Usage = t.answer(
    "MessageUsage", input_tokens=Count, cache_creation_input_tokens=Count, cache_read_input_tokens=Count, output_tokens=Count
)  # fmt: skip
MessagesAnswer = t.answer(
    "MessagesAnswer", id=str, type=Literal["message"], role=Literal["assistant"], model=str,
    content=t.many(t.either(_Text, _Thought, _ToolUse)),
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"],
    stop_sequence=str | None, stop_details=None, usage=_Usage, **shared.MEASURED,
)  # fmt: skip
AnthropicError = t.answer(
    "AnthropicError", type=Literal["error"],
    error=t.answer("AnthropicErrorBody", type=str, message=str, param=str | None, code=str | None),
)  # fmt: skip
CountAnswer = t.answer("MessageTokens", input_tokens=Count)
