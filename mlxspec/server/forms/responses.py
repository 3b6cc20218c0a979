"""OpenAI's Responses: `/v1/responses`.

Fields that all APIs share stand beside them under their usual names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag

from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.chat import JsonSchema
from mlxspec.server.forms.shared import Count

_ELSES = "bookkeeping of the client's"

# --- parts and items of the input


class Part(t.Fields):
    harmless = shared.CACHE | t.harmless("annotations logprobs", shared.UNREAD)


class TextPart(Part):
    type: Literal["input_text", "output_text", "text"]
    text: t.Text


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: t.Text


class ImagePart(Part, shared.Detailed):
    type: Literal["input_image"]
    image_url: shared.DataUrl


Content = t.Text | t.Many[Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]]


class Item(t.Fields):
    id: t.Id | None = None
    status: Annotated[str, Field(max_length=40)] | None = None
    harmless = t.harmless("phase namespace caller name", _ELSES)


class MessageItem(Item):
    type: Literal["message"] = t.optional()
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Item):
    namespace: t.Id | None = None
    call_id: t.Name
    name: t.Name


class FunctionCall(CallItem):
    type: Literal["function_call"]
    arguments: t.Text


class CustomToolCall(CallItem):
    type: Literal["custom_tool_call"]
    input: t.Text


class CallOutput(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: t.Name
    output: Content


class ThoughtText(t.Fields):
    type: str = t.optional()
    text: t.Text


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: t.Many[ThoughtText] | None = None
    content: t.Many[ThoughtText] | None = None
    encrypted_content: t.Text | None = None


class ItemReference(t.Fields):
    """Names an item of a stored response. Nothing is stored here: it is left out, with a notice."""

    id: t.Id
    type: Literal["item_reference"] | None = None


ItemLeftOut = Literal[
    "compaction", "compaction_trigger", "web_search_call", "file_search_call", "computer_call", "computer_call_output",
    "code_interpreter_call", "image_generation_call", "tool_search_call", "tool_search_output", "additional_tools", "local_shell_call",
    "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "mcp_list_tools",
    "mcp_call", "mcp_approval_request", "mcp_approval_response", "program", "program_output",
]  # fmt: skip


class OtherItem(t.LeftOut):
    type: ItemLeftOut


def _kind_of_item(value: Any) -> Any:
    """Items without a type are messages, those with nothing but an id are references."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message" if {*value} != {"id"} else "item_reference")
    return "other" if isinstance(kind, str) and kind in get_args(ItemLeftOut) else kind


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of_item),
]

# --- tools and formats


class ToolFormat(t.Fields):
    """Of a custom tool: told to the model, and not enforced."""

    type: Literal["text", "grammar"] = t.optional()
    syntax: Annotated[str, Field(max_length=40)] | None = None
    definition: t.Text | None = None


class OneTool(t.Fields):
    type: t.Id = Field(
        description="function, custom or namespace; tools of other types, which the provider runs, are left out"
    )
    name: t.ToolName = t.optional()
    description: t.Text | None = None
    parameters: t.Object | None = None
    strict: t.Flag = None
    format: ToolFormat | None = None
    harmless: ClassVar = {**shared.CACHE, **t.harmless("defer_loading", "all tools are told to the model")}


class ResponsesTool(OneTool):
    tools: t.Tools[OneTool] | None = t.optional("of a namespace: told to the model as NAMESPACE__NAME")


class Chosen(t.Fields):
    type: Literal["function", "custom"]
    name: t.Name


class Allowed(t.Fields):
    type: t.Id = Field(description="function or custom; tools of other types are left out")
    name: t.Name = t.optional()


class AllowedResponseTools(t.Fields):
    """The model is told of all tools, and may call these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[t.Tools[Allowed], Field(min_length=1)]


class ReasoningConfig(t.Fields):
    effort: shared.Effort | None = None
    harmless = t.harmless("summary generate_summary", "reasoning is given whole")


class PlainFormat(t.Fields):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextConfig(t.Fields):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    harmless = t.harmless("verbosity", "a hint that only some of OpenAI's models follow")


# --- the request


class ResponsesRequest(shared.Body, shared.ThinkingFields, shared.Generation):
    input: t.Text | t.Turns[AnyItem]
    instructions: t.Text | None = None
    stream: t.Flag = None
    stream_options: t.Fields | None = None
    stop: shared.Word | shared.Words | None = None
    tools: t.Tools[ResponsesTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[Chosen | AllowedResponseTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: t.Flag = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    max_output_tokens: shared.Length | None = t.optional("-1: to the context's end")
    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    include: Annotated[t.Many[t.Id], Field(max_length=64)] | None = None
    refused: ClassVar = {
        **shared.one_answer("response", shared.NO_LOGPROBS, "item"),
        **t.refuse("background", "this server answers while the client waits", False),
        **t.refuse("previous_response_id conversation", "nothing is stored here; send the whole conversation as input"),
        **t.refuse("truncation", "a prompt is read whole or refused; send a shorter history", "disabled"),
        **t.refuse("prompt", "prompts are not stored here"),
        **t.refuse("context_management", "a prompt is read whole or refused", *t.OFF),
        **t.refuse("messages", "use input"),
        **t.refuse("max_tokens max_completion_tokens n_predict", "use max_output_tokens"),
        **t.refuse("response_format", "use text.format"),
    }  # fmt: skip
    harmless: ClassVar = {
        **shared.HARMLESS,
        **t.harmless("client_metadata", _ELSES),
        **t.harmless("store", "nothing is stored here"),
        **t.harmless("max_tool_calls", "it counts tools that the provider runs, and there are none"),
    }


# --- the answer

_ITEM: dict[str, Any] = {"id": str, "status": Literal["completed", "incomplete"]}
_Text = t.answer(
    "OutputText", type=Literal["output_text"], text=str, annotations=list[dict[str, Any]], logprobs=list[dict[str, Any]]
)  # fmt: skip
_Message = t.answer(
    "OutputMessage", **_ITEM, type=Literal["message"], role=Literal["assistant"], content=t.many(_Text)
)
_Reasoning = t.answer(
    "OutputReasoning", "encrypted_content", **_ITEM, type=Literal["reasoning"], summary=list[dict[str, Any]],
    content=t.many(t.answer("ReasoningText", type=Literal["reasoning_text"], text=str)), encrypted_content=str,
)  # fmt: skip
_CALL: dict[str, Any] = {**_ITEM, "call_id": str, "name": str, "namespace": str}
_Call = t.answer("OutputCall", "namespace", **_CALL, type=Literal["function_call"], arguments=str)
_CustomCall = t.answer("OutputCustomCall", "namespace", **_CALL, type=Literal["custom_tool_call"], input=str)
_Usage = t.answer(
    "ResponseUsage", input_tokens=Count, input_tokens_details=t.answer("InputDetails", cached_tokens=Count, cache_write_tokens=Count),
    output_tokens=Count, output_tokens_details=t.answer("OutputDetails", reasoning_tokens=Count), total_tokens=Count,
)  # fmt: skip
ResponsesAnswer = t.answer(
    "ResponsesAnswer", **_ITEM, object=Literal["response"], created_at=Count, completed_at=int | None, model=str, error=None,
    incomplete_details=t.either(t.answer("IncompleteDetails", reason=str), None),
    output=t.many(t.either(_Message, _Reasoning, _Call, _CustomCall)),
    usage=_Usage, background=Literal[False], instructions=str | None, max_output_tokens=int | None, metadata=dict[str, Any],
    parallel_tool_calls=bool, previous_response_id=None, reasoning=dict[str, Any], store=Literal[False], temperature=float,
    text=dict[str, Any], tool_choice=str | dict[str, Any], tools=list[dict[str, Any]], top_p=float, truncation=Literal["disabled"],
    **shared.MEASURED,
)  # fmt: skip
