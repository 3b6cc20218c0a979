"""Converts messages from the clients' form to the form that chat templates read, and renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.errors import ConfigError
from mlxspec.loading.template import ChatTemplate
from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.values import loads
from mlxspec.server.errors import BadField


def render_calls(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """The text of messages as `normalize` makes them.

    Arguments of an earlier call that are no JSON object are given to the template as text, as the model wrote them. A template that takes
    an object only gets one whose member `arguments` is that text. Raises ConfigError.
    """
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


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with an object for the arguments of every call."""
    if not _calls(message):
        return message
    calls = []
    for call in _calls(message):
        function = call["function"]
        given = function["arguments"]
        arguments = given if isinstance(given, Mapping) else {"arguments": given}
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Text parts joined, `developer` as `system`, arguments as objects, reasoning under the name templates know. Raises BadField."""
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    out: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    calls = message.get("tool_calls")
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            out["reasoning_content"] = reasoning
        if calls:
            out["tool_calls"] = [_call(c) for c in calls]
    elif calls:
        raise BadField(f"{path}.tool_calls", f"Only an assistant calls tools, not the role {role}.")
    elif message.get("content") is None:
        raise BadField(f"{path}.content", f"{path}.content is missing.")
    if (
        role == "assistant"
        and message.get("content") is None
        and not calls
        and "reasoning_content" not in out
    ):
        raise BadField(f"{path}.content", f"{path} says nothing: content and tool_calls are both missing.")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            out[name] = message[name]
    return out


def text_of(content: Any) -> str:
    """A message's content: a text, or the joined text of its parts."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments_of(function["arguments"])},
    }


def arguments_of(given: Any) -> dict[str, Any] | str:
    """An object where they are one, else the text as it stands: a model's broken call must not end its conversation."""
    if isinstance(given, Mapping):
        return dict(given)
    found = loads(given or "{}")
    return found if isinstance(found, dict) else str(given)
