"""OpenAI's Responses, `/v1/responses`: the form of its requests and answers, how a request is read, and how an answer is written, streamed
or whole. Fields that all APIs share may be sent too, under their usual names.

The input is changed for the chat template as follows:

    instructions, and system and developer messages before any other item     the first message
    a system or developer message later                                       text of the user's at the same place
    reasoning, a message, calls that follow each other                        one message of the assistant's
    a custom tool                                                             a function with one text, `input`
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from mlxspec.server.answer_format import ANY_OBJECT, AnswerFormat, answer_format
from mlxspec.server.answer_writer import NAMED_EVENTS, Read, SingleWriter
from mlxspec.server.blocks import Answer, Block, BlockBegin, BlockEvent, BlockMore
from mlxspec.server.chat_api import JsonSchema
from mlxspec.server.errors import ApiError, BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.chat import RefusalPart
from mlxspec.server.forms.shared import Count
from mlxspec.server.images import lines
from mlxspec.server.job import ChatRequest, CustomGrammar, Job, TemplateMessage, ToolChoice, goes_on_with
from mlxspec.server.job_run import End, Progress
from mlxspec.server.messages import arguments_of
from mlxspec.server.params import Own, chat_job, check_same, formats_of, template_variables
from mlxspec.server.prompt import Context, chat_prompt
from mlxspec.server.template_messages import TemplateMessages, custom_tool, function_tool, other_tool
from mlxspec.server.usable import left_out, types_of
from mlxspec.server.usage import progress

# --- the form

_ELSES = "bookkeeping of the client's"

# --- parts and items of the input


class Part(t.Fields):
    harmless = shared.CACHE | t.harmless("annotations logprobs", shared.UNREAD)


class TextPart(Part):
    type: Literal["input_text", "output_text", "text"]
    text: t.Text


class ImagePart(Part, shared.Detailed):
    type: Literal["input_image"]
    image_url: shared.DataUrl


AnyPart = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]
Content = t.Text | t.Many[AnyPart]


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
    call_id: t.Name | None = t.optional("without it, the result is that of the first call that has none")
    name: t.Name | None = None
    namespace: t.Id | None = None
    output: Content


class ThoughtText(t.Fields):
    type: str = t.optional()
    text: t.Text


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: t.Many[ThoughtText] | None = None
    content: t.Many[ThoughtText] | None = None
    encrypted_content: t.Text | None = None


class CompactionItem(Item):
    """A summary of the conversation before it, as `/v1/responses/compact` returns one."""

    type: Literal["compaction"]
    encrypted_content: t.Text
    harmless = t.harmless("created_by", _ELSES)


class ItemReference(t.Fields):
    """A reference to an item of a stored response. It is left out with a notice, because nothing is stored here."""

    id: t.Id
    type: Literal["item_reference"] | None = None


class OtherItem(t.LeftOut):
    """An item of any other type: it is left out, with a notice."""

    type: t.Text


_ITEMS = types_of(
    MessageItem | FunctionCall | CallOutput | ReasoningItem | CustomToolCall | CompactionItem | ItemReference
)


def _kind_of_item(value: Any) -> Any:
    """Return the type of an item, which selects its form. An item without a type is a message, or a reference where it has nothing but
    an id."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message" if {*value} != {"id"} else "item_reference")
    return "other" if isinstance(kind, str) and kind not in _ITEMS else kind


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of_item),
]

# --- tools and formats


class ToolFormat(t.Fields):
    """The grammar of a custom tool. The model reads it in the tool's description; it is enforced where a call of the tool is required."""

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
    """A choice of tools: the prompt lists all tools of the request, and the model may call these."""

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
    parts: ClassVar = types_of(AnyPart)
    input: t.Text | t.Turns[AnyItem]
    instructions: t.Text | None = None
    stream: t.Flag = None
    stream_options: t.Fields | None = None
    stop: t.Word | shared.Words | None = None
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


# --- reading and writing

# Clients send `encrypted_content` back where they leave the text of reasoning out. Ours is that text, and no secret: it went out in clear.
_SEAL = "mlxspec:"
_PREFIXES = {"thinking": "rs_", "text": "msg_", "call": "fc_"}
SUMMARY = "Summary of the conversation so far:"
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


def sealed(text: str) -> str:
    return _SEAL + base64.b64encode(text.encode()).decode()


def unsealed(value: str | None) -> str:
    """Return the text that `sealed` has encoded; empty for None and for a value that another server has encrypted."""
    if value is None or not value.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def conversation(form: ResponsesRequest) -> ChatRequest:
    """Return the conversation of a request, in the form that all APIs share. Raises BadField, GrammarError."""
    notices, customs = list[str](), list[CustomGrammar]()
    items = input_items(form.input)
    messages = _messages(items, form.instructions, notices)
    if not messages or messages[-1]["role"] == "system":
        raise BadField("input", "input must not be empty.")
    tools = form.tools or ()
    if form.reasoning is not None and form.reasoning.effort is not None:
        check_same(form.reasoning_effort, "reasoning_effort", form.reasoning.effort, "reasoning.effort")
        form.reasoning_effort = form.reasoning.effort
    return ChatRequest(
        messages=messages,
        tools=_tools(tools, notices, customs),
        tool_choice=_tool_choice(form.tool_choice, tools),
        several_calls=form.parallel_tool_calls is not False,
        goes_on=goes_on_with(messages, f"input[{len(items) - 1}]"),
        template=template_variables(form),
        wanted=answer_format(formats_of(form), _wanted(form.text)),
        notices=tuple(notices),
        customs=tuple(customs),
    )


def read(form: ResponsesRequest, at: Context) -> Read:
    """Return the job of a request, and the function that makes the writer of its answer from the model's name and the job. Raises
    subclasses of MlxspecError for a request that cannot be honoured."""
    if _LOGPROBS in (form.include or ()):
        raise BadField(
            "include", f"include: {_LOGPROBS} cannot be honoured here; /v1/chat/completions has them."
        )
    write = writer(form)
    prompt = chat_prompt(conversation(form), at)
    own = Own(max_tokens=form.max_output_tokens, stop=form.stop, streams=bool(form.stream))
    return chat_job(form, at, prompt, own), write


def input_items(given: str | Sequence[AnyItem]) -> Sequence[AnyItem]:
    """Return a request's input as a list of items; a text becomes one message of the user."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)] if given else []
    return given


def _messages(
    items: Sequence[AnyItem], instructions: str | None, notices: list[str]
) -> list[TemplateMessage]:
    system = [instructions] if instructions else []
    out, other = TemplateMessages(), list[str]()
    for i, item in enumerate(items):
        path = f"input[{i}]"
        if isinstance(item, MessageItem):
            text, is_system = _text(item.content), item.role in ("system", "developer")
            if is_system and not out.messages:
                system += [text] if text else []
            elif item.role == "assistant":
                out.assistant()["content"] += text
            else:
                if is_system:
                    notices.append(f"{path} of the role {item.role} was given to the model as the user's")
                out.user(text)
        elif isinstance(item, ReasoningItem):
            said, summary = ("".join(part.text for part in p or ()) for p in (item.content, item.summary))
            out.think(said or unsealed(item.encrypted_content) or summary)
        elif isinstance(item, FunctionCall):
            out.call(item.call_id, _flat_name(item.name, item.namespace), arguments_of(item.arguments))
        elif isinstance(item, CustomToolCall):
            out.call(item.call_id, _flat_name(item.name, item.namespace), {"input": item.input})
        elif isinstance(item, CompactionItem):
            if summary := unsealed(item.encrypted_content):
                out.user(f"{SUMMARY}\n\n{summary}")
            else:
                notices.append(
                    f"{path} was left out: another server wrote this compaction, and it is encrypted"
                )
        elif not isinstance(item, CallOutput):
            other.append(item.type or "item_reference")
        else:
            tool = item.name and _flat_name(item.name, item.namespace)
            call_id = item.call_id or out.open_call(tool)
            if "item_reference" in other and (call_id is None or not out.knows(call_id)):
                other.append(item.type)  # the call may be what was referred to
            elif call_id is None:
                raise BadField(
                    f"{path}.call_id", f"{path} has no call_id, and no earlier call is without a result."
                )
            else:
                out.result(call_id, _text(item.output), f"{path}.call_id", "call of an earlier item")
    notices += left_out(other, "item")
    return out.behind("\n\n".join(system))


def message_text(item: MessageItem) -> str:
    """Return the text of a message."""
    return _text(item.content)


def _text(content: str | Sequence[AnyPart]) -> str:
    """Return the text of a message's content: a text, or its parts, each on a line of its own. Images have been replaced by placeholder
    texts before."""
    if isinstance(content, str):
        return content
    return lines(
        p.refusal if p.type == "refusal" else "" if p.type == "input_image" else p.text for p in content
    )


def _flat_name(name: str, space: str | None) -> str:
    """Return the name of a tool in the prompt: NAMESPACE__NAME for a tool of a namespace, else its own. space: the namespace or None."""
    return f"{space}__{name}" if space else name


@dataclass(frozen=True)
class Named:
    """A tool and the namespace that contains it; space is None for a tool without one."""

    tool: OneTool
    space: str | None

    @property
    def flat(self) -> str:
        return _flat_name(self.tool.name, self.space)


def _flat(tools: Sequence[ResponsesTool]) -> Iterator[tuple[str, Named]]:
    """Yield each tool with its path in the body; a namespace is replaced by its tools."""
    for i, tool in enumerate(tools):
        if tool.type == "namespace" and tool.name:
            for k, inner in enumerate(tool.tools or ()):
                yield f"tools[{i}].tools[{k}]", Named(inner, tool.name)
        else:
            yield f"tools[{i}]", Named(tool, None)


def _tools(
    tools: Sequence[ResponsesTool], notices: list[str], customs: list[CustomGrammar]
) -> list[dict[str, Any]]:
    """Return the tools that the client runs, in OpenAI's nested form. notices: receives a sentence for each tool that is left out;
    customs: receives the grammars of custom tools. Raises BadField."""
    out: list[dict[str, Any]] = []
    for path, named in _flat(tools):
        tool = named.tool
        if tool.type not in ("function", "custom"):
            notices.append(other_tool(path, tool.type))
            continue
        if tool.name is None:
            raise BadField(f"{path}.name", f"{path}.name is missing.")
        if named.flat in (known["function"]["name"] for known in out if named.space is not None):
            raise BadField(f"{path}.name", f"{path}: there is another tool {named.flat}.")
        if tool.type == "custom":
            grammar = tool.format or ToolFormat()
            out.append(
                custom_tool(
                    named.flat,
                    tool.description,
                    path,
                    customs,
                    syntax=grammar.syntax,
                    definition=grammar.definition,
                )
            )
        else:
            about = (tool.description or "").strip() or None
            made = function_tool(
                named.flat, parameters=tool.parameters, description=about, is_strict=tool.strict is True
            )
            out.append(made)
    return out


def _tool_choice(
    given: Literal["none", "auto", "required"] | Chosen | AllowedResponseTools | None,
    tools: Sequence[ResponsesTool],
) -> ToolChoice | None:
    if given is None or (given in ("auto", "none") and not tools):
        return None
    if isinstance(given, str):
        return ToolChoice(kind=given)
    known = {n.tool.name: n.flat for _, n in reversed([*_flat(tools)]) if n.tool.name is not None}
    if isinstance(given, Chosen):
        return ToolChoice(kind="required", named=known.get(given.name, given.name))
    names = [a.name for a in given.tools if a.type in ("function", "custom") and a.name is not None]
    return ToolChoice(kind=given.mode, allowed=tuple(known.get(name, name) for name in names))


def _wanted(text: TextConfig | None) -> AnswerFormat | None:
    wanted = text and text.format
    if not wanted or wanted.type == "text":
        return None
    if not isinstance(wanted, SchemaFormat):
        return AnswerFormat(field="text.format", kind="json_schema", value=ANY_OBJECT)
    is_strict = wanted.strict is True
    return AnswerFormat(field="text.format", kind="json_schema", value=wanted.schema_, is_strict=is_strict)


def writer(form: ResponsesRequest) -> Callable[[str, Job], ResponsesWriter]:
    """Return the function that makes the writer of a request's answer from the model's name and the job. The answer repeats members of
    the request."""
    return partial(
        ResponsesWriter,
        is_sealed=_SEALED in (form.include or ()),
        tools=[named for _, named in _flat(form.tools or ()) if named.tool.name],
        echo={
            "instructions": form.instructions,
            "max_output_tokens": form.max_output_tokens,
            "metadata": form.metadata or {},
            "parallel_tool_calls": form.parallel_tool_calls is not False,
            "reasoning": {"effort": form.reasoning and form.reasoning.effort, "summary": None},
            "text": {"format": t.plain(form.text and form.text.format) or {"type": "text"}},
            "tool_choice": t.plain(form.tool_choice) or "auto",
            "tools": t.plain(form.tools or []),
        },
    )


class ResponsesWriter(SingleWriter):
    """A writer of one response of OpenAI's Responses API. Each event of its stream has the next `sequence_number`: response.created,
    response.in_progress; for each item output_item.added, its parts, output_item.done; response.completed or response.incomplete, or
    error and response.failed.

    Extensions: `timings` and `mlxspec` in a finished response, `timings` in deltas, `prompt_progress` in response.in_progress.
    is_sealed: the client wants the text of reasoning in `encrypted_content` too. tools: the request's tools. echo: members of the
    request that the response repeats.
    """

    wire = NAMED_EVENTS

    def __init__(
        self, model: str, job: Job, *, is_sealed: bool, tools: Sequence[Named], echo: Mapping[str, Any]
    ) -> None:
        super().__init__(model, job)
        self._is_sealed = is_sealed
        self._custom = {named.flat for named in tools if named.tool.type == "custom"}
        self._called = {
            n.flat: {"name": n.tool.name, "namespace": n.space} for n in tools if n.space is not None
        }
        self._ids: dict[int, str] = {}  # of the items, by block
        self._num_events = 0
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "temperature": job.asks[0].params.temperature,
            "top_p": job.asks[0].params.top_p,
            "truncation": "disabled",
            **echo,
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def pause(self) -> dict[str, Any]:
        """Return another response.in_progress event. Codex ends a stream in which no event arrives, even if comments do."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        code = error.code or error.kind
        yield self._event("error", code=code, message=str(error), param=error.param)
        response = self._response("failed") | {"error": {"code": code, "message": str(error)}}
        yield self._event("response.failed", response=response)

    def _progressed(self, update: Progress) -> dict[str, Any]:
        response = self._response("in_progress") | {"prompt_progress": progress(update)}
        return self._event("response.in_progress", response=response)

    def _ended(self, answer: Answer, end: End) -> Iterator[dict[str, Any]]:
        response = self._whole(end)
        yield self._event(f"response.{response['status']}", response=response)

    # --- the response

    def _response(self, status: str, output: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(output),
            "usage": None,
        }

    def _whole(self, end: End) -> dict[str, Any]:
        """Return the response at its end as one object."""
        output = [self._item(block) for block in self._answer.blocks]
        is_cut = end.reason == "length"
        return self._response("incomplete" if is_cut else "completed", output) | {
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": self._usage(end),
            **self._measured(),
        }

    def _usage(self, end: End) -> dict[str, Any]:
        stats = end.stats
        return {
            "input_tokens": stats.num_prompt,
            "input_tokens_details": {"cached_tokens": stats.num_cached, "cache_write_tokens": 0},
            "output_tokens": stats.num_generated,
            "output_tokens_details": {"reasoning_tokens": stats.num_thinking or self._answer.num_thinking},
            "total_tokens": stats.num_prompt + stats.num_generated,
        }

    # --- its items

    def _id(self, block: Block) -> str:
        """Return the id of the item that a block becomes. It is made at the first call."""
        if block.number not in self._ids:
            prefix = "ctc_" if self._is_custom(block) else _PREFIXES[block.kind]
            self._ids[block.number] = f"{prefix}{secrets.token_hex(24)}"
        return self._ids[block.number]

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and block.name in self._custom

    def _status(self, block: Block) -> str:
        """Return the status of an ended item: `incomplete` for the last item of an answer that a limit cut, else `completed`."""
        end = self._answer.end
        is_cut = end is not None and end.reason == "length"
        return "incomplete" if is_cut and block is self._answer.blocks[-1] else "completed"

    def _item(self, block: Block, *, is_new: bool = False) -> dict[str, Any]:
        """Return the item that a block becomes, with the block's whole text. is_new: as at the block's beginning, without text."""
        status = "in_progress" if is_new else self._status(block)
        head = {"id": self._id(block), "status": status}
        if block.kind == "text":
            content: list[dict[str, Any]] = [] if is_new else [_output_text(block.text)]
            return {**head, "type": "message", "role": "assistant", "content": content}
        if block.kind == "thinking":
            parts: list[dict[str, Any]] = [] if is_new else [{"type": "reasoning_text", "text": block.text}]
            item: dict[str, Any] = {**head, "type": "reasoning", "summary": [], "content": parts}
            seal: dict[str, Any] = (
                {"encrypted_content": sealed(block.text)} if self._is_sealed and not is_new else {}
            )
            return {**item, **seal}
        head |= {"call_id": block.call_id, "name": block.name, **self._called.get(block.name, {})}
        if self._is_custom(block):
            return {**head, "type": "custom_tool_call", "input": "" if is_new else block.custom_input()}
        return {**head, "type": "function_call", "arguments": "" if is_new else block.text}

    def _written(self, event: BlockEvent, beside: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        block = event.block
        place: dict[str, Any] = {"output_index": block.number, "item_id": self._id(block)}
        part: dict[str, Any] = {**place, "content_index": 0}
        name = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}[
            block.kind
        ]
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if isinstance(event, BlockBegin):
            item = self._item(block, is_new=True)
            yield self._event("response.output_item.added", output_index=block.number, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=_part(block, ""))
        elif isinstance(event, BlockMore):
            if not self._is_custom(block):
                where = place if block.kind == "call" else part
                yield self._event(f"response.{name}.delta", **where, delta=event.text, **more, **beside)
        else:
            if self._is_custom(block):
                given = block.custom_input()
                yield self._event("response.custom_tool_call_input.delta", **place, delta=given)
                yield self._event("response.custom_tool_call_input.done", **place, input=given)
            elif block.kind == "call":
                yield self._event(
                    f"response.{name}.done", **place, arguments=block.text, name=self._item(block)["name"]
                )
            else:
                yield self._event(f"response.{name}.done", **part, text=block.text, **more)
                yield self._event("response.content_part.done", **part, part=_part(block, block.text))
            item = self._item(block)
            yield self._event("response.output_item.done", output_index=block.number, item=item)

    def _event(self, kind: str, **members: Any) -> dict[str, Any]:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **members}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _part(block: Block, text: str) -> dict[str, Any]:
    return _output_text(text) if block.kind == "text" else {"type": "reasoning_text", "text": text}
