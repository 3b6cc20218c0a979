"""The public grammar of each API's stream, as a state machine: what may follow what, and how the pieces add up to the whole answer.

Each class takes the objects of one stream, in order, with `feed`, raises AssertionError at the first that may not stand there, and is
asked with `finish` whether the stream may end. `text`, `thinking`, `calls`: what the stream said.
"""

from __future__ import annotations

import json
from typing import Any


class Said:
    """What a stream says in the end. calls: (name, arguments as JSON text)."""

    def __init__(self) -> None:
        self.text = self.thinking = ""
        self.calls: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.is_done = False


class MessagesGrammar(Said):
    """Anthropic's: message_start, blocks one after the other, message_delta, message_stop; pings anywhere between; or an error."""

    _FITTING = {  # noqa: RUF012
        "text": {"text_delta"},
        "thinking": {"thinking_delta", "signature_delta"},
        "tool_use": {"input_json_delta"},
    }

    def __init__(self) -> None:
        super().__init__()
        self.state = "start"
        self.num_blocks = 0
        self.kind = ""
        self.is_signed = False
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.usage: dict[str, int] = {}

    def feed(self, event: str, found: dict[str, Any]) -> None:
        assert event == found["type"], (event, found)
        assert self.state != "end", found
        if event == "ping":
            assert self.state != "start"
        elif event == "error":
            assert set(found["error"]) >= {"type", "message"}
            self.state = "end"
        else:
            getattr(self, f"_{event}")(found)

    def _message_start(self, found: dict[str, Any]) -> None:
        assert self.state == "start"
        message = found["message"]
        assert message["id"].startswith("msg_")
        assert (message["type"], message["role"]) == ("message", "assistant")
        assert message["content"] == []
        assert message["stop_reason"] is None
        assert message["usage"]["output_tokens"] == 0
        self.usage = message["usage"]
        self.state = "between"

    def _content_block_start(self, found: dict[str, Any]) -> None:
        assert self.state == "between"
        assert found["index"] == self.num_blocks
        block = found["content_block"]
        self.kind, self.is_signed = block["type"], False
        assert block.get("text", "") == block.get("thinking", "") == ""
        if self.kind == "tool_use":
            assert block["input"] == {}
            assert block["id"] not in self.ids
            self.ids.append(block["id"])
            self.calls.append((block["name"], ""))
        self.state = "block"

    def _content_block_delta(self, found: dict[str, Any]) -> None:
        assert self.state == "block"
        assert found["index"] == self.num_blocks
        delta = found["delta"]
        assert delta["type"] in self._FITTING[self.kind]
        assert not self.is_signed
        if delta["type"] == "text_delta":
            assert delta["text"]
            self.text += delta["text"]
        elif delta["type"] == "thinking_delta":
            self.thinking += delta["thinking"]
        elif delta["type"] == "signature_delta":
            self.is_signed = bool(delta["signature"])
            assert self.is_signed
        else:
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + delta["partial_json"])

    def _content_block_stop(self, found: dict[str, Any]) -> None:
        assert self.state == "block"
        assert found["index"] == self.num_blocks
        assert self.is_signed == (self.kind == "thinking")
        self.num_blocks += 1
        self.state = "between"

    def _message_delta(self, found: dict[str, Any]) -> None:
        assert self.state == "between"
        self.stop_reason = found["delta"]["stop_reason"]
        self.stop_sequence = found["delta"]["stop_sequence"]
        assert self.stop_reason in (
            "end_turn",
            "max_tokens",
            "stop_sequence",
            "tool_use",
            "model_context_window_exceeded",
        )
        assert (self.stop_sequence is not None) == (self.stop_reason == "stop_sequence")
        assert (self.stop_reason != "tool_use") or self.calls
        for name in ("input_tokens", "cache_read_input_tokens"):
            assert found["usage"][name] == self.usage[name]
        self.usage = found["usage"]
        self.state = "stopping"

    def _message_stop(self, found: dict[str, Any]) -> None:
        assert self.state == "stopping"
        self.state, self.is_done = "end", True

    def finish(self) -> None:
        assert self.is_done, self.state
        if self.stop_reason == "tool_use":
            assert all(isinstance(json.loads(arguments or "{}"), dict) for _, arguments in self.calls)


def named_events(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(event, object) of a stream in which each event has a name. Comments are left out."""
    out = []
    for block in data.decode().split("\n\n"):
        if not block or block.startswith(": "):
            continue
        lines = block.split("\n")
        assert len(lines) == 2, block
        assert lines[0].startswith("event: "), block
        assert lines[1].startswith("data: "), block
        out.append((lines[0][7:], json.loads(lines[1][6:])))
    return out
