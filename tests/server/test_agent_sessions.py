"""Sessions of twelve turns as Claude Code (Messages), Codex (Responses) and opencode (chat completions) send them, offline: an image and a
PDF that the model cannot read in results of tools, a block that nobody knows yet, a call that the user cancelled, and a compaction. Every
turn is answered, also each one behind them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxspec.server.demo_agent import ECHO, SENTENCE
from tests.server.serving import Served

Dict = dict[str, Any]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()
PDF = base64.b64encode(b"%PDF-1.7\n%%EOF").decode()
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TURNS = (
    "text", "image", "text", "pdf", "unknown", "cancelled", "text", "compaction", "image", "text", "unknown", "text",
)  # fmt: skip


@pytest.fixture(scope="module")
def agent() -> Iterator[Served]:
    with Served("--model", "demo-agent", "--max-rows", "2") as served:
        yield served
        assert not [line for line in served.lines if "Traceback" in line]


class Session:
    """A conversation in one API's words. history: what the next request holds."""

    path: str

    def __init__(self, served: Served) -> None:
        self._served = served
        self.history: list[Dict] = []

    def body(self) -> Dict:
        raise NotImplementedError

    def calls(self, answer: Dict) -> list[tuple[str, Dict]]:
        """(id, arguments) of each call; what was answered joins the history."""
        raise NotImplementedError

    def said(self, answer: Dict) -> str:
        raise NotImplementedError

    def ask(self) -> Dict:
        status, answer = self._served.post(self.path, self.body())
        assert status == 200, answer
        return answer

    def turn(self, kind: str) -> None:
        """The user asks, the shell is called, its result comes back, and the answer says so."""
        if kind == "compaction":
            self.compact()
        self.user("Say it.")
        ((name, arguments),) = self.calls(self.ask())
        assert arguments == {"command": ECHO}
        if kind == "cancelled":
            self.cancel(name)
        else:
            self.result(name, kind)
        answer = self.ask()
        assert self.calls(answer) == []
        assert self.said(answer) == SENTENCE

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def compact(self) -> None:
        self.user("Condense this conversation.")
        assert self.calls(self.ask())  # the demo's script calls the shell whoever asks
        self.history = []
        self.user("This session continues another one. It was about a command.")

    def cancel(self, name: str) -> None:
        """The user stops the call and asks again."""
        raise NotImplementedError

    def result(self, name: str, kind: str) -> None:
        raise NotImplementedError


class ClaudeCode(Session):
    path = "/v1/messages?beta=true"

    def body(self) -> Dict:
        return {
            "model": "demo-agent",
            "max_tokens": 300,
            "system": [
                {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}
            ],
            "messages": self.history,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "tools": [
                {"name": "Bash", "input_schema": SHELL},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
        }

    def calls(self, answer: Dict) -> list[tuple[str, Dict]]:
        self.history.append({"role": "assistant", "content": answer["content"]})
        return [(b["id"], b["input"]) for b in answer["content"] if b["type"] == "tool_use"]

    def said(self, answer: Dict) -> str:
        return "".join(b["text"] for b in answer["content"] if b["type"] == "text")

    def cancel(self, name: str) -> None:
        stopped = {
            "type": "tool_result",
            "tool_use_id": name,
            "is_error": True,
            "content": "The user rejected it.",
        }
        asked = {"type": "text", "text": "[Request interrupted by user for tool use]"}
        self.history.append({"role": "user", "content": [stopped, asked]})
        self.user("Do it all the same.")

    def result(self, name: str, kind: str) -> None:
        parts: dict[str, Any] = {
            "image": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
            ],
            "pdf": [
                {
                    "type": "document",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
                }
            ],
            "unknown": [{"type": "hologram", "data": "x"}, {"type": "text", "text": "done"}],
        }
        block = {"type": "tool_result", "tool_use_id": name, "content": parts.get(kind, "hello")}
        beside = [{"type": "hologram", "data": "x"}] if kind == "unknown" else []
        self.history.append({"role": "user", "content": [block, *beside]})


class Codex(Session):
    path = "/v1/responses"

    def body(self) -> Dict:
        shell = {"type": "function", "name": "exec_command", "parameters": SHELL, "strict": False}
        return {
            "model": "demo-agent",
            "instructions": "You are Codex.",
            "input": self.history,
            "max_output_tokens": 300,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"},
            "tools": [shell, {"type": "web_search"}, {"type": "image_generation"}],
        }

    def calls(self, answer: Dict) -> list[tuple[str, Dict]]:
        reasoned = {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "encrypted_content": "of another provider",
        }
        self.history += [reasoned, *answer["output"]]
        return [
            (i["call_id"], json.loads(i["arguments"]))
            for i in answer["output"]
            if i["type"] == "function_call"
        ]

    def said(self, answer: Dict) -> str:
        return "".join(p["text"] for i in answer["output"] if i["type"] == "message" for p in i["content"])

    def cancel(self, name: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": name, "output": "aborted by user"})
        self.user("<turn_aborted>Do it all the same.</turn_aborted>")

    def compact(self) -> None:
        super().compact()
        self.history.append({"type": "compaction", "encrypted_content": "of another provider"})

    def result(self, name: str, kind: str) -> None:
        parts: dict[str, Any] = {
            "image": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}],
            "pdf": [
                {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
            ],
            "unknown": [{"type": "hologram", "data": "x"}],
        }
        self.history.append(
            {"type": "function_call_output", "call_id": name, "output": parts.get(kind, "hello")}
        )
        if kind == "unknown":
            self.history.append({"type": "hologram", "data": "x"})


class OpenCode(Session):
    path = "/v1/chat/completions"

    def body(self) -> Dict:
        shell = {"type": "function", "function": {"name": "bash", "parameters": SHELL}}
        system = {"role": "system", "content": "You are opencode."}
        return {
            "model": "demo-agent",
            "messages": [system, *self.history],
            "max_tokens": 300,
            "tools": [shell, {"type": "web_search"}],
            "tool_choice": "auto",
            "reasoning": {"effort": "medium"},
        }

    def calls(self, answer: Dict) -> list[tuple[str, Dict]]:
        message = answer["choices"][0]["message"]
        self.history.append(message)
        return [(c["id"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]

    def said(self, answer: Dict) -> str:
        return str(answer["choices"][0]["message"]["content"])

    def cancel(self, name: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": name, "content": "Tool execution aborted"})
        self.user("Do it all the same.")

    def result(self, name: str, kind: str) -> None:
        parts: dict[str, Any] = {
            "image": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}],
            "pdf": [
                {
                    "type": "file",
                    "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"},
                }
            ],
            "unknown": [{"type": "hologram", "data": "x"}],
        }
        self.history.append({"role": "tool", "tool_call_id": name, "content": parts.get(kind, "hello")})


APIS: dict[str, Callable[[Served], Session]] = {"claude": ClaudeCode, "codex": Codex, "opencode": OpenCode}


@pytest.mark.parametrize("program", APIS)
def test_twelve_turns_are_answered(agent: Served, program: str) -> None:
    session = APIS[program](agent)
    for kind in TURNS:
        session.turn(kind)
