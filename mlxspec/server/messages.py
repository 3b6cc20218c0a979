"""Converts messages from the clients' form to the form that chat templates read, and renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.errors import ConfigError
from mlxspec.loading.template import ChatTemplate
from mlxspec.server.errors import BadField

_MEDIA = {
    "image": "Images",
    "image_url": "Images",
    "input_image": "Images",
    "input_audio": "Sounds",
    "audio_url": "Sounds",
    "video_url": "Videos",
    "input_video": "Videos",
    "file": "Files",
    "input_file": "Files",
}


def refuse_media(messages: Any) -> None:
    """Raises BadField for the first part that is no text, by what it is. Takes anything: called before a body is checked."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _MEDIA:
                path = f"messages[{i}].content[{j}]"
                raise BadField(f"{path}.type", f"{_MEDIA[kind]} are not supported yet: {path} must be text.")


def render_calls(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """The text of checked messages.

    Arguments of an earlier call that are no JSON object are given to the template as text, as the model wrote them. A template that takes
    an object only gets one whose member `arguments` is that text. Raises BadField, ConfigError.
    """
    normal = normalize(messages)
    try:
        return template.render(normal, **options)
    except ConfigError:
        calls = [c["function"] for m in normal for c in m.get("tool_calls", ())]
        broken = [f for f in calls if isinstance(f["arguments"], str)]
        if not broken:
            raise
        for function in broken:
            function["arguments"] = {"arguments": function["arguments"]}
        return template.render(normal, **options)


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
        "function": {"name": function["name"], "arguments": _arguments(function["arguments"])},
    }


def _arguments(given: Any) -> dict[str, Any] | str:
    """An object where they are one, else the text as it stands: a model's broken call must not end its conversation."""
    if isinstance(given, Mapping):
        return dict(given)
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return str(given)
    return found if isinstance(found, dict) else str(given)
