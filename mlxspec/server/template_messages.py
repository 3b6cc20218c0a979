"""Builds messages, as chat templates read them, out of an API's blocks or items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxspec.server.errors import BadField
from mlxspec.server.images import lines
from mlxspec.server.job import CustomGrammar, TemplateCall, TemplateMessage


class TemplateMessages:
    """A list of messages for a chat template that is built from an API's blocks or items. messages: those so far, without the system
    message. Successive texts of one role become one message; each tool's result is a message of its own."""

    def __init__(self) -> None:
        self.messages: list[TemplateMessage] = []
        self._names: dict[str, str] = {}  # call id -> tool
        self._open: list[str] = []  # ids of calls that have no result

    def user(self, text: str) -> None:
        """Add a text of the user, on a line of its own."""
        if self._is_last("user"):
            self.messages[-1]["content"] = lines([self.messages[-1]["content"], text])
        else:
            self.messages.append({"role": "user", "content": text})

    def begin_again(self, summary: str) -> None:
        """Replace all messages so far by a summary, as a message of the user."""
        self.messages = [{"role": "user", "content": summary}]

    def assistant(self) -> TemplateMessage:
        """Return the last message, if it is the assistant's; else append an empty message of the assistant, and return it."""
        if not self._is_last("assistant"):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def think(self, text: str) -> None:
        """Add reasoning of the assistant; an empty text adds nothing."""
        if text:
            message = self.assistant()
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any] | str) -> None:
        """Add a tool call of the assistant. arguments: an object, or a text that is no JSON object."""
        self._names[call_id] = name
        self._open.append(call_id)
        call: TemplateCall = {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self.assistant().setdefault("tool_calls", []).append(call)

    def knows(self, call_id: str) -> bool:
        """Return whether a call with this id has been added."""
        return call_id in self._names

    def open_call(self, name: str | None) -> str | None:
        """Return the id of the first call without a result; None where there is none. name: only calls of this tool; None for any tool."""
        return next((i for i in self._open if name in (None, self._names[i])), None)

    def result(self, call_id: str, text: str, path: str, called: str) -> None:
        """Append the result of a call. path: the field of the body with the call's id; called: the API's word for a call, for errors.
        Raises BadField for an unknown id."""
        name = self._names.get(call_id)
        if name is None:
            raise BadField(path, f"{path} names no {called}.")
        if call_id in self._open:
            self._open.remove(call_id)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def behind(self, system: str) -> list[TemplateMessage]:
        """Return all messages with the system message first, which is left out where `system` is empty. An empty message of the
        assistant at the end is removed, because the answer begins there."""
        if self._is_last("assistant") and self.messages[-1] == {"role": "assistant", "content": ""}:
            self.messages.pop()
        first: list[TemplateMessage] = [{"role": "system", "content": system}] if system else []
        return [*first, *self.messages]

    def _is_last(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role


def function_tool(
    name: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    description: str | None = None,
    is_strict: bool = False,
) -> dict[str, Any]:
    """Return a tool in OpenAI's nested form. parameters: its JSON schema."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if is_strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def other_tool(path: str, kind: str) -> str:
    """Return the notice on a tool that is left out, because the provider of the API would run it. path: its place in the body; kind: its
    type."""
    return f"{path} of the type {kind[:60]} was left out: only function and custom tools can be used"


def custom_tool(
    name: str,
    description: str | None,
    path: str,
    customs: list[CustomGrammar],
    *,
    syntax: str | None = None,
    definition: str | None = None,
) -> dict[str, Any]:
    """Return a custom tool as a function whose only argument is a text, `input`. path: its place in the body. customs: receives its
    grammar, if it has one. syntax: `lark` or `regex`; definition: the grammar."""
    about = description or ""
    if definition:
        syntax = syntax or "lark"
        about += f"\nThe input follows this {syntax} grammar:\n{definition}"
        customs.append(CustomGrammar(tool=name, path=path, syntax=syntax, definition=definition))
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, parameters=text, description=about.strip() or None)
