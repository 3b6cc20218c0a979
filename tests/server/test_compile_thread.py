"""Where grammars of requests are compiled: in the server's own threads, so that rows that are being answered go on meanwhile."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.serving import Served

PLANT = """
import sys, threading
from mlxspec.sampling.grammar import GrammarCompiler
compile = GrammarCompiler.compile

def told(self, *asked):
    print("compiled in", threading.current_thread().name, file=sys.stderr, flush=True)
    return compile(self, *asked)

GrammarCompiler.compile = told
"""
TOOL = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]},
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
REQUIRED = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
BODIES = {
    "/v1/chat/completions": {**CHAT, **REQUIRED},
    "/v1/chat/completions#several": {**CHAT, "response_format": SCHEMA, "n": 3, "temperature": 1},
    "/v1/completions": {"prompt": "hi", "regex": "[ab]{3}", "max_tokens": 9},
    "/v1/messages": {
        **CHAT,
        "tools": [{"name": "look_up", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "any"},
    },
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
    "/api/chat": {"messages": CHAT["messages"], "format": {"type": "boolean"}, "stream": False},
}


@pytest.fixture(scope="module")
def telling():
    with Served("--max-rows", "4", plant=PLANT) as served:
        yield served


@pytest.mark.parametrize("path", BODIES)
def test_no_grammar_is_compiled_in_the_engines_thread(telling: Served, path: str) -> None:
    before = len(telling.lines)
    status, answer = telling.post(path.partition("#")[0], BODIES[path])
    assert status == 200, answer
    telling.wait_for("compiled in", after=before)
    lines = list(telling.lines)[before:]
    threads = [found[1] for line in lines if (found := re.search(r"compiled in (\S+)", line))]
    assert len(threads) == 1  # once for all answers of a request
    assert not threads[0].startswith(("mlxspec-engine", "MainThread")), threads
