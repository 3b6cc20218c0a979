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
    """Return the text that the chat template renders of a conversation, and notices on changes that this needed. messages: as
    `normalize` returns them.

    A system message after the first message becomes a message of the user at the same place, if the template refuses it or leaves it
    out. Raises ConfigError where the template fails.
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
    """Return the conversation without those earlier answers of which the template renders nothing: they have neither content nor calls,
    and the template leaves out their thinking. The user's messages around such an answer are joined, because many templates require
    that roles alternate."""
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
    """Return the text that the template renders of these messages. Arguments of an earlier call that are no JSON object are passed as
    text; a template that fails with a text gets an object with this text as the member `arguments`. Raises ConfigError."""
    try:
        return template.render(messages, **options)
    except ConfigError:
        if all(isinstance(c["function"]["arguments"], Mapping) for m in messages for c in _calls(m)):
            raise
        return template.render([_with_objects(m) for m in messages], **options)


def call_lead(template: ChatTemplate, form: ChatFormat, options: Mapping[str, Any]) -> str:
    """Return the white space that a template writes between the beginning of an answer, or the end of its thinking, and a tool call.

    An answer that must be a call begins with this white space. The next prompt, which contains the answer as an earlier turn, then
    begins with the generated text, so that the prefix cache has it. Empty where the template writes other text there, or renders an
    earlier turn otherwise than the beginning of an answer. options: variables of the request for the template.
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
    """Return the message with the arguments of each call as an object: arguments that are a text become its member `arguments`."""
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
    """Return whether a rendered text contains any line of a message's content. White space around lines is ignored, since templates
    change it."""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content)
    said = [line.strip() for line in content.splitlines() if line.strip()]
    return not said or any(line in text for line in said)


def _systems_as_users(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return the messages with each system message after the first message as one of the user. It is joined with a message of the user
    next to it."""
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
    """Return two contents of messages as one, the second below the first. Each is a text or a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return lines([first, second])
    parts = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in (first, second))
    return [part for content in parts for part in content]


def _takes_responses(source: str) -> bool:
    """Return whether a template reads the results of tools from the member `tool_responses` of the message with the calls, and knows no
    role `tool`. The first published templates of Gemma 4 are such. source: the template's source."""
    return "tool_responses" in source and _TOOL_ROLE.search(source) is None


def _with_responses(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return the messages with results of tools moved to `tool_responses` of the assistant's message with the calls. Such a template
    writes calls, results and then content in one turn. So content that precedes calls becomes a message of its own, and an answer
    after the results becomes the content."""
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
    """Return the name of the tool of the call with this id; that of the only call where there is one; else "unknown"."""
    names = [c["function"]["name"] for c in calls if c["id"] == call_id or len(calls) == 1]
    return names[0] if names else "unknown"


def normalize(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Return the messages of a request in the form that chat templates read. Text parts are joined, `developer` becomes `system`, system
    messages at the beginning become one, arguments become objects, and reasoning is under `reasoning_content`. Raises BadField."""
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
    """Return the text of a message's content, its text parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_said, content))


def _said(part: AnyPart) -> str:
    """Return the text of a part; empty for thoughts and images."""
    if part.type == "refusal":
        return part.refusal
    return part.text if part.type in ("text", "input_text", "output_text") else ""


def _thought(content: str | Sequence[AnyPart] | None) -> str:
    """Return the joined text of the reasoning parts of a message's content."""
    said = ""
    for part in () if content is None or isinstance(content, str) else content:
        if part.type == "thinking" or part.type == "reasoning":
            text = part.thinking or part.reasoning or part.text or ""
            said += text if isinstance(text, str) else "".join(each.text for each in text)
    return said


def _call(call: ToolCall, path: str) -> TemplateCall:
    """Return a tool call in the form that chat templates read. Raises BadField for a call that names no function."""
    if call.custom is not None:
        return _called_function(call.id or "", call.custom.name, {"input": call.custom.input})
    if call.function is None:
        raise BadField(f"{path}.function", f"{path}.function is missing.")
    return _called_function(call.id or "", call.function.name, call.function.arguments)


def _called_function(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> TemplateCall:
    function: TemplateFunction = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def arguments_of(given: str | Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the arguments of an earlier call as an object. A text that is no JSON object is returned unchanged, so that a broken call
    of a model does not end its conversation."""
    if isinstance(given, Mapping):
        return dict(given)
    found = loads(given or "{}")
    return found if isinstance(found, dict) else given
