"""Builds messages, as chat templates read them, out of an API's blocks or items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxspec.server.errors import BadField
from mlxspec.server.images import lines
from mlxspec.server.job import CustomGrammar, TemplateCall, TemplateMessage


class TemplateMessages:
    """`messages`: so far, without the system's. Neighbouring texts of one role are one message; a tool's result is one of its own."""

    def __init__(self) -> None:
        self.messages: list[TemplateMessage] = []
        self._names: dict[str, str] = {}  # call id -> tool
        self._open: list[str] = []  # ids of calls that have no result

    def user(self, text: str) -> None:
        """Add a text of the user's, on a line of its own."""
        if self._is_last("user"):
            self.messages[-1]["content"] = lines([self.messages[-1]["content"], text])
        else:
            self.messages.append({"role": "user", "content": text})

    def begin_again(self, summary: str) -> None:
        """Replace all messages so far by a summary, as the user's text."""
        self.messages = [{"role": "user", "content": summary}]

    def assistant(self) -> TemplateMessage:
        """The message of the assistant's at the end, which is made where there is none."""
        if not self._is_last("assistant"):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def think(self, text: str) -> None:
        """Add a thought of the assistant's, which may be empty."""
        if text:
            message = self.assistant()
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any] | str) -> None:
        """Add a call of a tool by the assistant."""
        self._names[call_id] = name
        self._open.append(call_id)
        call: TemplateCall = {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self.assistant().setdefault("tool_calls", []).append(call)

    def knows(self, call_id: str) -> bool:
        """Whether there is such a call."""
        return call_id in self._names

    def open_call(self, name: str | None) -> str | None:
        """Return the id of the first call that has no result, of the tool `name` where one is given; None where there is none."""
        return next((i for i in self._open if name in (None, self._names[i])), None)

    def result(self, call_id: str, text: str, path: str, called: str) -> None:
        """Append the result of a call. path: the field with the call's id; called: what the API calls a call. Raises BadField for an
        unknown one."""
        name = self._names.get(call_id)
        if name is None:
            raise BadField(path, f"{path} names no {called}.")
        if call_id in self._open:
            self._open.remove(call_id)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def behind(self, system: str) -> list[TemplateMessage]:
        """All messages, the system's first; an empty one is left out, and an empty answer at the end, where another answer begins."""
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
    """A tool in OpenAI's nested form."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if is_strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def other_tool(path: str, kind: str) -> str:
    """The notice about a tool that the provider would run."""
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
    """A custom tool, whose input is a text, as a function with one text. syntax, definition: of its grammar, if it has one. customs: gets
    that."""
    about = description or ""
    if definition:
        syntax = syntax or "lark"
        about += f"\nThe input follows this {syntax} grammar:\n{definition}"
        customs.append(CustomGrammar(tool=name, path=path, syntax=syntax, definition=definition))
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, parameters=text, description=about.strip() or None)
