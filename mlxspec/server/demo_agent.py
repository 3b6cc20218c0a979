"""`demo-agent`: the loop of an agent without a download. The model has not been trained to call tools, so a grammar fixes its answers.

The first answer of a turn calls the agent's shell with ECHO, and the answer after the result is SENTENCE. Prompts, the prefix cache,
drafts, streams and the way a call is read are those of any model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlxspec.parsers.formats import ChatFormat
from mlxspec.server.answer_format import AnswerFormat
from mlxspec.server.job import ChatRequest, ToolChoice, function_of, tool_name
from mlxspec.server.rules import Rules, rules_of

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

ECHO = "echo hello from mlxspec"
SENTENCE = "The tool has run. That is all demo-agent can do: -m names a model that works."
NOTICE = "demo-agent says what a script has it say: one call of the shell, and a sentence"
_COMMANDS = ("command", "cmd")  # what agents call the text that their shell runs

Asked = tuple[ChatRequest, Sequence[Mapping[str, Any]], ToolChoice]


def scripted_rules(
    talk: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    form: ChatFormat,
    engine: Engine,
) -> Rules:
    """Return the rules of an answer of `demo-agent`, which follows a script: a call of the shell, then one sentence. Parameters and
    errors are those of `rules_of`."""
    found = rules_of(*_scripted(talk, tools, choice), form, engine)
    return replace(found, notices=[*found.notices, NOTICE])


def _scripted(talk: ChatRequest, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Asked:
    """Return the conversation, the tools and the tool choice with the script's next step in them. They are returned unchanged where the
    request itself sets a format or requires a call."""
    if talk.wanted is not None or choice.kind == "required":
        return talk, tools, choice
    roles = [m["role"] for m in talk.messages]
    newest = roles[len(roles) - roles[::-1].index("assistant") :] if "assistant" in roles else roles
    shell = next(filter(None, map(_call_of, choice.of(tools))), None)
    if shell is None or "tool" in newest:
        said = AnswerFormat(field="demo-agent", kind="regex", value=re.escape(SENTENCE))
        return replace(talk, wanted=said), tools, choice
    named = ToolChoice(kind="required", named=tool_name(shell))
    return replace(talk, several_calls=False), [shell], named


def _call_of(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a copy of the tool whose schema allows exactly one call, of the command ECHO; None for a tool that runs no command."""
    function = function_of(tool)
    parameters = function.get("parameters") or {}
    given = parameters.get("properties") or {}
    name = next((n for n in _COMMANDS if n in given and _has_type(given[n], "string", "array")), None)
    if name is None:
        return None
    words: Any = ECHO if _has_type(given[name], "string") else ECHO.split()
    needed = dict.fromkeys([name, *parameters.get("required", ())])
    properties = {
        n: {"const": "Say hello."} if _has_type(given.get(n), "string") else given.get(n) or {}
        for n in needed
    }
    schema = {"type": "object", "properties": {**properties, name: {"const": words}}, "required": [*needed]}
    return {**tool, "function": {**function, "parameters": {**parameters, **schema}}}


def _has_type(schema: Any, *names: str) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") in names and "enum" not in schema
