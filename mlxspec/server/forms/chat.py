"""Messages of OpenAI's chat completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared


class ImageUrl(shared.Detailed):
    url: shared.DataUrl


class ImageUrlPart(t.Fields):
    type: Literal["image_url"]
    image_url: ImageUrl
    harmless = shared.TextBlock.harmless


class OtherText(t.Fields):
    """A text part in the form of the Responses API."""

    type: Literal["input_text", "output_text"]
    text: t.Text
    harmless = shared.TextBlock.harmless | t.harmless("logprobs", shared.UNREAD)


class RefusalPart(t.Fields):
    type: Literal["refusal"]
    refusal: t.Text
    harmless = shared.TextBlock.harmless | t.harmless("logprobs", shared.UNREAD)


class ThoughtPart(t.LeftOut):
    """A part that holds reasoning, as Mistral's and LangChain's clients send it. It is read as `reasoning_content`."""

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
