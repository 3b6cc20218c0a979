"""Anthropic's Messages, `/v1/messages` and `/v1/messages/count_tokens`: the form of its requests and answers, how a request is read, and
how an answer is written, streamed or whole. Fields that all APIs share may be sent too, under their usual names.

A conversation is changed for the chat template as follows:

    system                   the first message; headers that change with each request are left out (`without_volatile`)
    a system message later   text of the user's at the same place, because many templates allow a system message at the beginning only
    tool_result              a message of the role tool, before or after the user's text, in the client's order
    thinking                 `reasoning_content`; signatures are not read, and redacted thinking is left out
    messages of one role     that follow each other are one message, as the API defines it
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlxspec.server.answer_format import AnswerFormat, answer_format
from mlxspec.server.answer_writer import NAMED_EVENTS, Read, SingleWriter
from mlxspec.server.blocks import Answer, Block, BlockBegin, BlockEvent, BlockMore
from mlxspec.server.chat_api import Tool
from mlxspec.server.errors import ApiError, BadField, anthropic_error
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.chat import ChatMessage
from mlxspec.server.forms.shared import Count
from mlxspec.server.images import lines
from mlxspec.server.job import ChatRequest, Job, TemplateMessage, ToolChoice, goes_on_with
from mlxspec.server.job_run import End, Progress, Update
from mlxspec.server.params import Own, chat_job, check_same, formats_of, template_variables
from mlxspec.server.prompt import Context, chat_prompt
from mlxspec.server.template_messages import TemplateMessages, function_tool
from mlxspec.server.usable import left_out, types_of
from mlxspec.server.usage import progress

# --- the form

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
    """A document of text, whose text is passed to the model."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: t.Text | None = None
    context: t.Text | None = None


class SearchResult(MessageBlock):
    """A search result, whose text is passed to the model."""

    type: Literal["search_result"]
    source: t.Text
    title: t.Text
    content: t.Many[shared.TextBlock]


class ToolReference(MessageBlock):
    """A reference to a tool that the client has found. The model gets the descriptions of all tools in any case."""

    type: Literal["tool_reference"]
    tool_name: t.Name


ResultBlock = Annotated[
    shared.TextBlock | ImageBlock | Document | SearchResult | ToolReference, Field(discriminator="type")
]


class ToolResult(MessageBlock):
    type: Literal["tool_result"]
    tool_use_id: t.Id
    content: t.Text | t.Many[ResultBlock] | None = None
    is_error: t.Flag = None


class Thought(MessageBlock):
    type: Literal["thinking"]
    thinking: t.Text
    signature: str | None = t.optional("not read")


class RedactedThought(MessageBlock):
    type: Literal["redacted_thinking"]
    data: str = t.optional("not read: nothing here can decrypt it")


class Compaction(MessageBlock):
    """A summary that replaces all messages before it."""

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
    content: t.Text | t.Many[AnyBlock] | None
    harmless = ChatMessage.harmless


# --- tools, thinking, format


class ClientTool(t.Fields):
    type: t.Id | None = t.optional(
        "`custom`; tools of other types, which the provider runs or describes, are left out"
    )
    name: t.ToolName = t.optional()
    description: t.Text | None = None
    input_schema: t.Object = t.optional()
    strict: t.Flag = None
    harmless: ClassVar = {
        **Tool.harmless,
        **t.harmless("eager_input_streaming", "a call is given when it is closed"),
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
    parts: ClassVar = types_of(AnyBlock)
    result_parts: ClassVar = types_of(ResultBlock)
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


# --- reading and writing

# The API's clients send a thinking block back only if it is signed. This one says who wrote it, and proves nothing.
SIGNATURE = "mlxspec"
# What Claude Code writes into its system prompt anew for each request: a line for billing at the beginning, a budget at the end.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
_BUDGET = re.compile(r"\n?<total_tokens>[^<\n]{0,100}</total_tokens>")
_INLINED = ("document", "search_result", "tool_reference")
_KNOWN = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking", "compaction", *_INLINED)
_STOP_REASONS = {
    "end": "end_turn",
    "stop_string": "stop_sequence",
    "limit": "max_tokens",
    "context": "model_context_window_exceeded",
}


def without_volatile(system: str) -> str:
    """Return a system prompt without the lines that a known client changes with each request, so that the prompt's beginning stays the
    same."""
    return _BUDGET.sub("", _BILLING.sub("", system))


def conversation(form: CountTokensRequest) -> ChatRequest:
    """Return the conversation of a request of /messages or /messages/count_tokens, in the form that all APIs share. Raises BadField,
    GrammarError."""
    notices: list[str] = []
    messages = _messages(form.system, form.messages, notices)
    if not messages or messages[-1]["role"] == "system":
        raise BadField("messages", "messages say nothing: their content is empty.")
    _take_thinking(form)
    choice = form.tool_choice
    is_single = choice is not None and choice.type != "none" and choice.disable_parallel_tool_use
    own, output = None, form.output_config
    if output is not None and output.format is not None:
        own = AnswerFormat(field="output_config.format", kind="json_schema", value=output.format.schema_)
    return ChatRequest(
        messages=messages,
        tools=_tools(form.tools or (), notices),
        tool_choice=_tool_choice(choice, has_tools=bool(form.tools)),
        several_calls=not is_single,
        goes_on=goes_on_with(messages, f"messages[{len(form.messages) - 1}]"),
        template=template_variables(form),
        wanted=answer_format(formats_of(form) if isinstance(form, MessagesRequest) else {}, own),
        notices=tuple(notices),
    )


def read(form: MessagesRequest, at: Context) -> Read:
    """Return the job of a request, and the function that makes the writer of its answer from the model's name and the job. Raises
    subclasses of MlxspecError for a request that cannot be honoured."""
    prompt = chat_prompt(conversation(form), at)
    own = Own(max_tokens=form.max_tokens, stop=form.stop_sequences, streams=bool(form.stream))
    thinking = form.thinking
    is_shown = thinking is None or thinking.type == "disabled" or thinking.display != "omitted"
    return chat_job(form, at, prompt, own), partial(MessagesWriter, shows_thinking=is_shown)


def _messages(
    system: str | Sequence[shared.TextBlock] | None, messages: Sequence[Message], notices: list[str]
) -> list[TemplateMessage]:
    parts = [system or ""] if system is None or isinstance(system, str) else [part.text for part in system]
    texts = [without_volatile(part) for part in parts]
    if texts != parts:
        notices.append("a header that changes with each request was left out of system")
    out, other = TemplateMessages(), list[str]()
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if message.role == "system":
            notices.append(f"{path} of the role system was given to the model as the user's")
        content = message.content
        if content is None or isinstance(content, str):
            content = [shared.TextBlock(type="text", text=content or "")]
        add = _add_assistant if message.role == "assistant" else _add_user
        known = [b for b in content if b.type in _KNOWN]
        other += [b.type for b in content if b.type not in _KNOWN]
        if known or not content or add is _add_assistant:
            add(out, known, path, notices)
    notices += left_out(other, "block")
    return out.behind("\n".join(t for t in texts if t))


def _add_assistant(out: TemplateMessages, blocks: Sequence[AnyBlock], path: str, notices: list[str]) -> None:
    for j, block in enumerate(blocks):
        if isinstance(block, shared.TextBlock):
            out.assistant()["content"] += block.text
        elif isinstance(block, Thought):
            out.think(block.thinking)
        elif isinstance(block, ToolUse):
            out.call(block.id, block.name, dict(block.input))
        elif isinstance(block, ToolResult):
            raise BadField(f"{path}.content[{j}]", f"{path}.content[{j}]: a tool_result is the user's.")
        elif isinstance(block, Compaction) and block.content:
            out.begin_again(block.content)
            notices.append(
                f"the compaction in {path} was given to the model as the user's text in place of all before it"
            )
    out.assistant()  # an answer may be empty


def _add_user(out: TemplateMessages, blocks: Sequence[AnyBlock], path: str, notices: list[str]) -> None:
    for j, block in enumerate(blocks):
        place = f"{path}.content[{j}]"
        if isinstance(block, shared.TextBlock | Document | SearchResult):
            out.user(_as_text(block, place, notices))
        elif isinstance(block, ToolResult):
            given = block.content or ""
            text = (
                given
                if isinstance(given, str)
                else lines(_as_text(b, f"{place}.content[{k}]", notices) for k, b in enumerate(given))
            )
            if block.is_error and not text:
                text = "The tool failed."
            called = "tool_use of an earlier message"
            out.result(block.tool_use_id, text, f"{place}.tool_use_id", called)
        else:
            raise BadField(place, f"{place}: a block of the type {block.type} is the assistant's.")
    if not blocks:
        raise BadField(f"{path}.content", f"{path} says nothing: its content is empty.")


def _as_text(block: ResultBlock, place: str, notices: list[str]) -> str:
    """Return the text of a block. A document, a search result or a tool reference becomes text with its title and source, and `notices`
    receives a sentence on this."""
    if isinstance(block, shared.TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        return ""  # images are texts by now
    if isinstance(block, ToolReference):
        said = [f"The tool {block.tool_name} can be used."]
    elif isinstance(block, SearchResult):
        said = [block.title, block.source, lines(part.text for part in block.content)]
    else:
        source = block.source
        said = [block.title or "", block.context or ""]
        if isinstance(source, TextSource):
            said.append(source.data)
        else:
            given = source.content
            said.append(given if isinstance(given, str) else lines(part.text for part in given))
    notices.append(f"{place} of the type {block.type} was given to the model as text")
    return "\n".join(s for s in said if s)


def _tools(tools: Sequence[ClientTool], notices: list[str]) -> list[dict[str, Any]]:
    """Return the tools that the client runs, in OpenAI's nested form. notices: receives a sentence for each tool that is left out.
    Raises BadField."""
    out = []
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            notices.append(
                f"tools[{i}] of the type {tool.type[:60]} was left out: only tools with an input_schema of their own can be used"
            )
            continue
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise BadField(f"tools[{i}].{name}", f"tools[{i}].{name} is missing.")
        made = function_tool(
            tool.name,
            parameters=tool.input_schema,
            description=tool.description,
            is_strict=tool.strict is True,
        )
        out.append(made)
    return out


def _tool_choice(given: MayCall | MustCall | CallsNothing | None, *, has_tools: bool) -> ToolChoice | None:
    if given is None or (given.type in ("auto", "none") and not has_tools):
        return None
    if given.type == "tool":
        return ToolChoice(kind="required", named=given.name)
    return ToolChoice(kind="required" if given.type == "any" else given.type)


def _take_thinking(form: CountTokensRequest) -> None:
    """Copy the values of `thinking` and `output_config` to this server's own fields of the form. Raises BadField where two fields
    contradict each other."""
    output, kwargs = form.output_config, form.chat_template_kwargs
    has_effort = form.reasoning_effort or (kwargs is not None and kwargs.reasoning_effort)
    if output is not None and not has_effort:
        form.reasoning_effort = output.effort
    thinking = form.thinking
    if thinking is None:
        return
    check_same(form.enable_thinking, "enable_thinking", thinking.type != "disabled", "thinking")
    form.enable_thinking = thinking.type != "disabled"
    if thinking.type == "enabled" and thinking.budget_tokens is not None:
        budget = thinking.budget_tokens
        check_same(
            getattr(form, "thinking_budget", None), "thinking_budget", budget, "thinking.budget_tokens"
        )
        if isinstance(form, MessagesRequest):
            form.thinking_budget = budget  # type: ignore[attr-defined]


class MessagesWriter(SingleWriter):
    """A writer of one message of Anthropic's API. Its stream is: message_start; for each block content_block_start, content_block_delta,
    content_block_stop; message_delta; message_stop. A ping may be sent anywhere between the first and the last.

    message_start is sent once the engine has begun to read the prompt, because the number of tokens from the prefix cache is known then.
    Extensions: `timings` and `mlxspec` in message_delta and in a whole message, `prompt_progress` in pings. shows_thinking: False leaves
    the text of thinking blocks empty.
    """

    wire = NAMED_EVENTS
    call_prefix = "toolu_"

    def __init__(self, model: str, job: Job, *, shows_thinking: bool = True) -> None:
        super().__init__(model, job)
        name = f"msg_{secrets.token_hex(12)}"
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._has_begun = False

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._begin(update)
        yield from super().chunks(update)

    def pause(self) -> dict[str, Any] | None:
        return {"type": "ping"} if self._has_begun else None

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield anthropic_error(error)

    def _begin(self, update: Update) -> Iterator[dict[str, Any]]:
        if isinstance(update, Progress):
            counts = _input(update.num_total, update.num_cached)
        else:
            counts = _input(update.stats.num_prompt, update.stats.num_cached)
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {**counts, "output_tokens": 0},
        }
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _progressed(self, update: Progress) -> dict[str, Any]:
        return {"type": "ping", "prompt_progress": progress(update)}

    def _ended(self, answer: Answer, end: End) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": _stopped(end), "usage": _usage(end), **self._measured()}
        yield {"type": "message_stop"}

    def _whole(self, end: End) -> dict[str, Any]:
        return {
            **self._head,
            "content": [self._content(block) for block in self._answer.blocks],
            **_stopped(end),
            "usage": _usage(end),
            **self._measured(),
        }

    def _written(self, event: BlockEvent, beside: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        block = event.block
        head = {"index": block.number}
        if isinstance(event, BlockBegin):
            empty = self._content(replace(block, text=""))
            unsigned = {"signature": ""} if block.kind == "thinking" else {}
            yield {"type": "content_block_start", **head, "content_block": empty | unsigned}
        elif isinstance(event, BlockMore):
            if block.kind == "thinking" and not self._shows_thinking:
                return
            delta = {
                "text": {"type": "text_delta", "text": event.text},
                "thinking": {"type": "thinking_delta", "thinking": event.text},
                "call": {"type": "input_json_delta", "partial_json": event.text},
            }[block.kind]
            yield {"type": "content_block_delta", **head, "delta": delta, **beside}
        else:
            if block.kind == "thinking":
                delta = {"type": "signature_delta", "signature": SIGNATURE}
                yield {"type": "content_block_delta", **head, "delta": delta}
            yield {"type": "content_block_stop", **head}

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "thinking":
            shown = block.text if self._shows_thinking else ""
            return {"type": "thinking", "thinking": shown, "signature": SIGNATURE}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments()}


def _stopped(end: End) -> dict[str, Any]:
    """Return the members of a message that contain the reason of its end."""
    reason = "tool_use" if end.reason == "tool_calls" else _STOP_REASONS[end.cause]
    said = end.stop_string if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": said, "stop_details": None}


def _input(num_prompt: int, num_cached: int) -> dict[str, int]:
    """Return the token counts of a prompt as Anthropic's API has them: `input_tokens` excludes tokens from the prefix cache, which have
    a member of their own."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
    }


def _usage(end: End) -> dict[str, int]:
    stats = end.stats
    return {**_input(stats.num_prompt, stats.num_cached), "output_tokens": stats.num_generated}
