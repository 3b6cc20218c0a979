"""What a model says in a task of three calls, in place of `demo-agent`'s own script: a command that fails, one that does not, and a call of
union_tool.py's tool whose arguments the model chooses itself. The answers behind the results go on. A request that says CUT gets a call
that the limit of tokens ends in the middle of its command."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxspec.loading.hub import DEMO_AGENT
from mlxspec.parsers.formats import ChatFormat
from mlxspec.server import app, demo_agent, params
from mlxspec.server.job import ChatRequest, ToolChoice, tool_name
from mlxspec.server.rules import Rules
from tests.server import union_tool

FILE = "ran.txt"
COMMANDS = (f"echo one >> {FILE}; exit 3", f"echo two >> {FILE}")
WHOLE = f"echo four >> {FILE}; echo five >> {FILE}"  # of which a beginning would run too
CUT = "Be cut."
_lock = threading.Lock()


def rules(
    talk: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    form: ChatFormat,
    engine: Any,
) -> Rules:
    """Make the rules of the next answer of the task."""
    roles = [m["role"] for m in talk.messages]
    asked = max((i for i, m in enumerate(talk.messages) if m["role"] == "user" and _says(m)), default=0)
    num_results = roles[asked:].count("tool")
    is_cut = any(CUT in str(m["content"]) for m in talk.messages if m["role"] == "user") and not num_results
    unions = [t for t in tools if tool_name(t).endswith(union_tool.NAME)]
    if num_results == len(COMMANDS) and unions:
        named = ToolChoice(kind="required", named=tool_name(unions[0]))
        return demo_agent.scripted_rules(replace(talk, several_calls=False), tools, named, form, engine)
    with _lock:
        before = demo_agent.ECHO
        try:
            if is_cut or num_results < len(COMMANDS):
                demo_agent.ECHO = WHOLE if is_cut else COMMANDS[num_results]
                talk = replace(talk, messages=[m for m in talk.messages if m["role"] != "tool"])
            found = demo_agent.scripted_rules(talk, tools, choice, form, engine)
        finally:
            demo_agent.ECHO = before
    return replace(found, params={**found.params, "max_tokens": LENGTH}) if is_cut and tools else found


SAID = "the next call is cut"
LENGTH = 40  # tokens: within the command


def plant() -> None:
    """Have a server follow the task, in its process. A request's own limit of tokens gives way to that of the rules."""
    app._SCRIPTS[DEMO_AGENT] = rules
    right = params._sampling

    def sampling(form: Any, at: Any, own: Any, ruled: Mapping[str, Any], num_prompt: int) -> Any:
        found = right(form, at, own, ruled, num_prompt)
        if "max_tokens" not in ruled:
            return found
        print(SAID, file=sys.stderr, flush=True)
        return replace(found, max_tokens=ruled["max_tokens"])

    params._sampling = sampling


def _says(message: Mapping[str, Any]) -> bool:
    return "Say it." in str(message["content"]) or CUT in str(message["content"])
