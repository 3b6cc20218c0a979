"""OpenAI's Responses, `/v1/responses`: the form of its requests and answers, how a request is read, and how an answer is written, streamed
or whole. Fields that all APIs share stand beside its own under their usual names.

What becomes of the input on its way to the chat template:

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from mlxspec.server.answer_format import ANY_OBJECT, AnswerFormat, answer_format
from mlxspec.server.answer_writer import NAMED_EVENTS, SingleWriter
from mlxspec.server.blocks import Answer, Block, BlockBegin, BlockEvent, BlockMore
from mlxspec.server.chat_api import JsonSchema, RefusalPart
from mlxspec.server.chat_request import (
    ChatRequest,
    CustomGrammar,
    ToolChoice,
    check_same,
    goes_on_with,
    template_variables,
)
from mlxspec.server.errors import ApiError, BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.shared import Count
from mlxspec.server.job_run import End, Progress
from mlxspec.server.messages import arguments_of
from mlxspec.server.request_parsing import Job
from mlxspec.server.template_messages import TemplateMessages, custom_tool, function_tool, joined, other_tool
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


class OtherItem(t.LeftOut):
    """An item of any other type: it is left out, with a notice."""

    type: t.Text


_ITEMS = types_of(MessageItem | FunctionCall | CallOutput | ReasoningItem | CustomToolCall | ItemReference)


def _kind_of_item(value: Any) -> Any:
    """Items without a type are messages, those with nothing but an id are references."""
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
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of_item),
]

# --- tools and formats


class ToolFormat(t.Fields):
    """The grammar of a custom tool: told to the model, and enforced where its call is required."""

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
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


def sealed(text: str) -> str:
    return _SEAL + base64.b64encode(text.encode()).decode()


def unsealed(value: str | None) -> str:
    """The text of `sealed`; empty for what another server has encrypted."""
    if value is None or not value.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def responses_request(body: Mapping[str, Any]) -> ChatRequest:
    """The chat request of a checked body. Raises BadField, GrammarError."""
    if _LOGPROBS in (body.get("include") or ()):
        raise BadField(
            "include", f"include: {_LOGPROBS} cannot be honoured here; /v1/chat/completions has them."
        )
    notices, customs = list[str](), list[CustomGrammar]()
    items = input_items(body)
    messages = _conversation(items, body.get("instructions"), notices)
    if not messages or messages[-1]["role"] == "system":
        raise BadField("input", "input must not be empty.")
    tools = _tools(body.get("tools") or (), notices, customs)
    return ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(body.get("tool_choice"), body),
        several_calls=body.get("parallel_tool_calls") is not False,
        goes_on=goes_on_with(messages, f"input[{len(items) - 1}]"),
        template=_template(body),
        wanted=_format(body),
        options={**body, "max_tokens": body.get("max_output_tokens")},
        notices=tuple(notices),
        customs=tuple(customs),
    )


def _kind(item: Mapping[str, Any]) -> str:
    return item.get("type") or ("item_reference" if {*item} <= {"id", "type"} else "message")


def input_items(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A checked body's input as items."""
    given = body["input"]
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}] if given else []
    return list(given)


def _conversation(
    items: Sequence[Mapping[str, Any]], instructions: str | None, notices: list[str]
) -> list[dict[str, Any]]:
    system = [instructions] if instructions else []
    out, other = TemplateMessages(), list[str]()
    for i, item in enumerate(items):
        path = f"input[{i}]"
        kind = _kind(item)
        if kind == "message":
            role, text = item["role"], joined(item["content"])
            is_system = role in ("system", "developer")
            if is_system and not out.messages:
                system += [text] if text else []
            elif role == "assistant":
                out.assistant()["content"] += text
            else:
                if is_system:
                    notices.append(f"{path} of the role {role} was given to the model as the user's")
                out.user(text)
        elif kind == "reasoning":
            said, summary = (
                "".join(part["text"] for part in item.get(member) or ()) for member in ("content", "summary")
            )
            out.think(said or unsealed(item.get("encrypted_content")) or summary)
        elif kind == "function_call":
            out.call(item["call_id"], _flat_name(item), arguments_of(item["arguments"]))
        elif kind == "custom_tool_call":
            out.call(item["call_id"], _flat_name(item), {"input": item["input"]})
        elif kind not in ("function_call_output", "custom_tool_call_output"):
            other.append(kind)
        elif "item_reference" in other and not out.knows(item["call_id"]):
            other.append(kind)  # the call may be what was referred to
        else:
            called = "call of an earlier item"
            out.result(item["call_id"], joined(item["output"]), f"{path}.call_id", called)
    notices += left_out(other, "item")
    return out.behind("\n\n".join(system))


def _flat_name(call: Mapping[str, Any]) -> str:
    """What the model knows a tool by: tools of a namespace have it in front of their name."""
    space = call.get("namespace")
    return f"{space}__{call['name']}" if space else str(call["name"])


def _flat(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Tools with their paths, those of a namespace in its place, with its name as their member `namespace`."""
    for i, tool in enumerate(tools):
        if tool["type"] == "namespace" and tool.get("name"):
            for k, inner in enumerate(tool.get("tools") or ()):
                yield f"tools[{i}].tools[{k}]", {**inner, "namespace": tool["name"]}
        else:
            yield f"tools[{i}]", tool


def _tools(
    tools: Sequence[Mapping[str, Any]], notices: list[str], customs: list[CustomGrammar]
) -> list[dict[str, Any]]:
    """The tools that a client runs, in the nested form. Raises BadField."""
    out: list[dict[str, Any]] = []
    for path, tool in _flat(tools):
        kind = tool["type"]
        if kind not in ("function", "custom"):
            notices.append(other_tool(path, kind))
            continue
        if "name" not in tool:
            raise BadField(f"{path}.name", f"{path}.name is missing.")
        named = {**tool, "name": _flat_name(tool)}
        if _flat_name(tool) in (t["function"]["name"] for t in out if "namespace" in tool):
            raise BadField(f"{path}.name", f"{path}: there is another tool {_flat_name(tool)}.")
        if kind == "custom":
            out.append(custom_tool(named, tool.get("format") or {}, path, customs))
        else:
            about = (tool.get("description") or "").strip() or None
            strict = tool.get("strict") is True
            out.append(
                function_tool(
                    named["name"], parameters=tool.get("parameters"), description=about, is_strict=strict
                )
            )
    return out


def _tool_choice(given: Any, body: Mapping[str, Any]) -> ToolChoice | None:
    if given is None or (given in ("auto", "none") and not body.get("tools")):
        return None
    if not isinstance(given, Mapping):
        return ToolChoice(kind=given)
    known = {
        t.get("name"): _flat_name(t) for _, t in reversed([*_flat(body.get("tools") or ())]) if "name" in t
    }
    if given["type"] != "allowed_tools":
        return ToolChoice(kind="required", named=known.get(given["name"], given["name"]))
    names = [t["name"] for t in given["tools"] if t["type"] in ("function", "custom") and "name" in t]
    return ToolChoice(kind=given["mode"], allowed=tuple(known.get(name, name) for name in names))


def _template(body: Mapping[str, Any]) -> dict[str, Any]:
    effort = (body.get("reasoning") or {}).get("effort")
    if effort is None:
        return template_variables(body)
    check_same(body, "reasoning_effort", effort, "reasoning.effort")
    return template_variables({**body, "reasoning_effort": effort})


def _format(body: Mapping[str, Any]) -> AnswerFormat | None:
    """Raises BadField."""
    wanted = (body.get("text") or {}).get("format")
    if wanted is None or wanted["type"] == "text":
        return answer_format(body)
    own = AnswerFormat(
        field="text.format",
        kind="json_schema",
        value=wanted.get("schema", ANY_OBJECT),
        is_strict=wanted.get("strict") is True,
    )
    return answer_format(body, own)


class ResponsesWriter(SingleWriter):
    """One response. Each event of its stream has the next `sequence_number`: response.created, response.in_progress; for each item
    output_item.added, its parts, output_item.done; response.completed or response.incomplete, or error and response.failed.

    Extensions: `timings` and `mlxspec` in a finished response, `timings` in deltas, `prompt_progress` in response.in_progress.
    """

    wire = NAMED_EVENTS

    def __init__(self, model: str, body: Mapping[str, Any], job: Job) -> None:
        super().__init__(model, body, job)
        params = job.asks[0].params
        self._is_sealed = _SEALED in (body.get("include") or ())
        tools = [tool for _, tool in _flat(body.get("tools") or ()) if tool.get("name")]
        self._custom = {_flat_name(t) for t in tools if t["type"] == "custom"}
        self._called = {
            _flat_name(t): {k: t[k] for k in ("name", "namespace")} for t in tools if "namespace" in t
        }
        self._ids: dict[int, str] = {}  # of the items, by block
        self._num_events = 0
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

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
        """The response at its end."""
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
        """Of the item that a block is, drawn when it is first asked for."""
        if block.number not in self._ids:
            prefix = "ctc_" if self._is_custom(block) else _PREFIXES[block.kind]
            self._ids[block.number] = f"{prefix}{secrets.token_hex(24)}"
        return self._ids[block.number]

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and block.name in self._custom

    def _status(self, block: Block) -> str:
        """Of an item that is written no more: the last one of an answer that was cut is incomplete."""
        end = self._answer.end
        is_cut = end is not None and end.reason == "length"
        return "incomplete" if is_cut and block is self._answer.blocks[-1] else "completed"

    def _item(self, block: Block, *, is_new: bool = False) -> dict[str, Any]:
        """As it is at its end. is_new: as it was when it began."""
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
