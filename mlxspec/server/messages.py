"""Converts messages from the clients' form to the form that chat templates read, and renders them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxspec.errors import ConfigError
from mlxspec.loading.spelled_tokens import unmarked
from mlxspec.loading.template import ChatTemplate
from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.values import loads
from mlxspec.server.errors import BadField
from mlxspec.server.forms.chat import AnyPart, ChatMessage, ToolCall
from mlxspec.server.images import lines
from mlxspec.server.job import ChatRequest, TemplateCall, TemplateFunction, TemplateMessage

_MARK = ("\ue000thought-", "\ue001")  # private-use characters: no message holds them by chance
_ROLES = {"developer": "system", "function": "tool"}
_TOOL_ROLE = re.compile(
    r"""[!=]=\s*['"]tool['"]|\bin\s*[\[(][^\])]{0,200}['"]tool['"]"""
)  # compared with a role


def render_conversation(
    template: ChatTemplate, messages: Sequence[TemplateMessage], options: Mapping[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """The text of messages as `normalize` makes them, and notices of what the template cannot show as it was sent.

    A system message behind the first message is given as the user's, at its place, where the template refuses it or leaves it out.
    Raises ConfigError.
    """
    if _takes_responses(template.source):
        messages = _with_responses(messages)
    later = [m["content"] for m in messages[1:] if m["role"] == "system"]
    try:
        text = _render_calls(template, messages, options)
    except ConfigError:
        if not later:
            raise
    else:
        shown = unmarked(text)
        if all(_is_in(content, shown) for content in later):
            return text, ()
    moved = _render_calls(template, _systems_as_users(messages), options)
    return moved, (
        "a system message behind the first message was given to the model as the user's, because its chat template takes none there",
    )


def without_unseen_answers(
    talk: ChatRequest, template: ChatTemplate, options: Mapping[str, Any]
) -> ChatRequest:
    """The conversation without earlier answers that the template shows nothing of: they have neither content nor calls, and it leaves their
    thinking out or refuses them. The user's messages around one are joined, because many templates want turns that alternate."""
    messages = list(talk.messages)
    marks = {i: f"{_MARK[0]}{i}{_MARK[1]}" for i, m in enumerate(messages) if _says_nothing(m)}
    if talk.goes_on is not None and not messages[-1].get("reasoning_content"):
        marks.pop(len(messages) - 1, None)  # the answer begins at its beginning
    if not marks:
        return talk
    marked: list[TemplateMessage] = [
        {**m, "reasoning_content": marks[i]} if i in marks and m.get("reasoning_content") else m
        for i, m in enumerate(messages)
    ]
    try:
        text, _ = render_conversation(template, marked, options)
    except ConfigError:
        text = ""
    unseen = {place for place, mark in marks.items() if mark not in text}
    out: list[TemplateMessage] = []
    for place, message in enumerate(messages):
        joins = place - 1 in unseen and out and out[-1]["role"] == message["role"] == "user"
        if joins:
            out[-1] = {**out[-1], "content": _below(out[-1]["content"], message["content"])}
        elif place not in unseen:
            out.append(message)
    if not unseen or not out or out[-1]["role"] == "system":
        return talk
    said = f"left out, because the chat template shows nothing of them: {len(unseen)} of the assistant's messages, without content or calls"
    goes_on = talk.goes_on if out[-1] is messages[-1] else None
    return replace(talk, messages=out, goes_on=goes_on, notices=(*talk.notices, said))


def _says_nothing(message: TemplateMessage) -> bool:
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def _render_calls(
    template: ChatTemplate, messages: Sequence[TemplateMessage], options: Mapping[str, Any]
) -> str:
    """Arguments of an earlier call that are no JSON object are given to the template as text, as the model wrote them. A template that
    takes an object only gets one whose member `arguments` is that text. Raises ConfigError."""
    try:
        return template.render(messages, **options)
    except ConfigError:
        if all(isinstance(c["function"]["arguments"], Mapping) for m in messages for c in _calls(m)):
            raise
        return template.render([_with_objects(m) for m in messages], **options)


def call_lead(template: ChatTemplate, form: ChatFormat, options: Mapping[str, Any]) -> str:
    """The white space that a template writes between the beginning of an answer, or the end of its thinking, and a call.

    An answer that must be a call begins with it. So the next prompt, which has the same answer as an earlier turn, begins with the text
    that was generated, and the prefix store knows it. Empty where the template writes other text there, or renders an earlier turn
    otherwise than the beginning of an answer. options: the request's for the template.
    """
    tags = form.call_tags
    question = {"role": "user", "content": "a"}
    function = {"name": "a", "arguments": {"a": "a"}}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    try:
        prompt = template.render([question], **options)
        is_thinking = form.opens_thinking(prompt)
        if is_thinking:
            answer["reasoning_content"] = "a"
        whole = template.render([question, answer], **{**options, "add_generation_prompt": False})
    except ConfigError:
        return ""
    if tags is None or not whole.startswith(prompt):
        return ""
    behind = whole[len(prompt) :]
    if is_thinking and form.thinking is not None:
        behind = behind.partition(form.thinking[1])[2]
    lead, tag, _ = behind.partition(tags.open)
    return lead if tag and not lead.strip() else ""


def _calls(message: TemplateMessage) -> Sequence[TemplateCall]:
    return message.get("tool_calls") or ()


def _with_objects(message: TemplateMessage) -> TemplateMessage:
    """The same with an object for the arguments of every call."""
    if not _calls(message):
        return message
    calls: list[TemplateCall] = []
    for call in _calls(message):
        function = call["function"]
        given = function["arguments"]
        arguments = given if isinstance(given, Mapping) else {"arguments": given}
        called: TemplateFunction = {**function, "arguments": arguments}
        calls.append({**call, "function": called})
    return {**message, "tool_calls": calls}


def _is_in(content: str | Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether a rendered text shows anything of a content. Templates may change white space."""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content)
    said = [line.strip() for line in content.splitlines() if line.strip()]
    return not said or any(line in text for line in said)


def _systems_as_users(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """System messages behind the first message as the user's. One beside a message of the user's is a part of it."""
    out: list[TemplateMessage] = []
    was_system = False
    for place, message in enumerate(messages):
        is_system = place > 0 and message["role"] == "system"
        if is_system:
            message = {"role": "user", "content": message["content"]}
        beside = out and out[-1]["role"] == message["role"] == "user"
        if beside and (is_system or was_system):
            out[-1] = {**out[-1], "content": _below(out[-1]["content"], message["content"])}
        else:
            out.append(message)
        was_system = is_system
    return out


def _below(first: Any, second: Any) -> Any:
    """Two contents as one, each text or parts."""
    if isinstance(first, str) and isinstance(second, str):
        return lines([first, second])
    parts = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in (first, second))
    return [part for content in parts for part in content]


def _takes_responses(source: str) -> bool:
    """Whether a template reads results of tools from `tool_responses` of the message that called them, and knows no role `tool`. So do
    the templates that Gemma 4 was first published with."""
    return "tool_responses" in source and _TOOL_ROLE.search(source) is None


def _with_responses(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Results of tools in `tool_responses` of the assistant's message with the calls. Such a template writes calls, results and then the
    content, all in one turn: a text in front of the calls is a message of its own, and a text behind the results is that content."""
    out: list[TemplateMessage] = []
    for message in messages:
        last: TemplateMessage = out[-1] if out else {"role": "", "content": ""}
        is_answer, calls = message["role"] == "assistant", _calls(message)
        if message["role"] == "tool" and _calls(last) and not last["content"]:
            name = message.get("name") or _called(_calls(last), message.get("tool_call_id"))
            last.setdefault("tool_responses", []).append({"name": name, "response": message["content"]})
        elif is_answer and calls and message["content"]:
            said, called = message.copy(), message.copy()
            said.pop("tool_calls")
            called.pop("reasoning_content", None)
            called["content"] = ""
            out += [said, called]
        elif is_answer and last.get("tool_responses") and not calls:
            last["content"] = message["content"]
        else:
            out.append(message.copy())
    return out


def _called(calls: Sequence[TemplateCall], call_id: str | None) -> str:
    """The name of the tool that the call with this id is of; of the only call without an id."""
    names = [c["function"]["name"] for c in calls if c["id"] == call_id or len(calls) == 1]
    return names[0] if names else "unknown"


def normalize(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Text parts joined, `developer` as `system`, system messages at the beginning as one, arguments as objects, reasoning under the name
    templates know. Raises BadField."""
    out: list[TemplateMessage] = []
    for i, given in enumerate(messages):
        message = _message(given, f"messages[{i}]")
        if len(out) == 1 and out[0]["role"] == message["role"] == "system":
            out[0]["content"] = "\n\n".join(c for c in (out[0]["content"], message["content"]) if c)
        else:
            out.append(message)
    return out


def _message(message: ChatMessage, path: str) -> TemplateMessage:
    role = _ROLES.get(message.role, message.role)
    out: TemplateMessage = {"role": role, "content": text_of(message.content)}
    old = message.function_call
    calls = [_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(message.tool_calls or ())]
    if not calls and old is not None:
        calls = [_called_function("", old.name, old.arguments)]
    if role == "assistant":
        reasoning = message.reasoning_content or message.reasoning or _thought(message.content)
        if reasoning:
            out["reasoning_content"] = reasoning
        if calls:
            out["tool_calls"] = calls
    elif calls:
        raise BadField(f"{path}.tool_calls", f"Only an assistant calls tools, not the role {role}.")
    elif message.content is None and role != "tool":  # a tool may have nothing to say
        raise BadField(f"{path}.content", f"{path}.content is missing.")
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


def text_of(content: str | Sequence[AnyPart] | None) -> str:
    """A message's content: a text, or the joined text of its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_said, content))


def _said(part: AnyPart) -> str:
    """The text of a part; thoughts and images have none."""
    if part.type == "refusal":
        return part.refusal
    return part.text if part.type in ("text", "input_text", "output_text") else ""


def _thought(content: str | Sequence[AnyPart] | None) -> str:
    """The reasoning in an answer's parts."""
    said = ""
    for part in () if content is None or isinstance(content, str) else content:
        if part.type == "thinking" or part.type == "reasoning":
            text = part.thinking or part.reasoning or part.text or ""
            said += text if isinstance(text, str) else "".join(each.text for each in text)
    return said


def _call(call: ToolCall, path: str) -> TemplateCall:
    """Raises BadField for a call of nothing."""
    if call.custom is not None:
        return _called_function(call.id or "", call.custom.name, {"input": call.custom.input})
    if call.function is None:
        raise BadField(f"{path}.function", f"{path}.function is missing.")
    return _called_function(call.id or "", call.function.name, call.function.arguments)


def _called_function(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> TemplateCall:
    function: TemplateFunction = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def arguments_of(given: str | Mapping[str, Any]) -> dict[str, Any] | str:
    """An object where they are one, else the text as it stands: a model's broken call must not end its conversation."""
    if isinstance(given, Mapping):
        return dict(given)
    found = loads(given or "{}")
    return found if isinstance(found, dict) else given
