"""Messages as clients send them to messages as chat templates read them. Knows roles and parts; renders nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.server.errors import BadField


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Text parts joined, `developer` as `system`, arguments as objects, reasoning under the name templates know. Raises BadField."""
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    out: dict[str, Any] = {"role": role, "content": _text(message.get("content"))}
    calls = message.get("tool_calls")
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            out["reasoning_content"] = reasoning
        if calls:
            out["tool_calls"] = [_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)]
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


def _text(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise BadField(
            f"{path}.function.arguments", f"{path}.function.arguments is no valid JSON."
        ) from error
    if not isinstance(arguments, dict):
        raise BadField(f"{path}.function.arguments", f"{path}.function.arguments must hold a JSON object.")
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
