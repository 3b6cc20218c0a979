"""The public grammar of each API's stream, as a state machine: what may follow what, and how the pieces add up to the whole answer.

Each class takes a stream's bytes with `read`, raises AssertionError at the first event that may not stand there, and is asked with `finish`
whether the stream may end. `text`, `thinking`, `calls`: what the stream said.
"""

from __future__ import annotations

import datetime
import json
from typing import Any


class Said:
    """What a stream says in the end. calls: (name, arguments as JSON text)."""

    SEPARATOR = b"\n\n"  # behind each event

    def __init__(self) -> None:
        self.text = self.thinking = ""
        self.calls: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.state = "start"  # "end" behind the last event, or behind an error
        self.is_done = False

    def read(self, data: bytes, *, is_cut: bool = False) -> None:
        """All events of a stream. is_cut: it may break off anywhere; an event that is not whole is left out."""
        whole, _, rest = data.rpartition(self.SEPARATOR)
        assert is_cut or not rest, rest
        for event in whole.split(self.SEPARATOR) if whole else ():
            if not event.startswith(b": "):  # a comment
                self._read(event.decode())

    def _read(self, event: str) -> None:
        """One event."""
        lines = event.split("\n")
        assert len(lines) == 2, event
        assert lines[0].startswith("event: "), event
        assert lines[1].startswith("data: "), event
        self.feed(lines[0][7:], json.loads(lines[1][6:]))

    def feed(self, event: str, found: dict[str, Any]) -> None:
        """One event with a name."""
        raise NotImplementedError


class ChatGrammar(Said):
    """OpenAI's chat completions with usage: a chunk with the role, chunks with text, reasoning or calls, one with the reason, one with the
    usage, and [DONE]; or an error in place of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.head: tuple[Any, ...] = ()

    def _read(self, event: str) -> None:
        assert event.startswith("data: ")
        assert self.state != "end", event
        if event == "data: [DONE]":
            assert self.state == "used"
            self.state, self.is_done = "end", True
            return
        chunk = json.loads(event[6:])
        if "error" in chunk:
            assert set(chunk["error"]) >= {"message", "type", "param", "code"}
            self.state = "end"
            return
        assert chunk["object"] == "chat.completion.chunk"
        head = tuple(chunk[name] for name in ("id", "created", "model", "system_fingerprint"))
        assert self.head in ((), head)
        self.head = head
        if not chunk["choices"]:
            assert self.state == "ended"
            self.usage, self.state = chunk["usage"], "used"
            return
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        self._delta(choice["delta"])
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] in ("stop", "length", "tool_calls")
            self.reason, self.state = choice["finish_reason"], "ended"

    def _delta(self, delta: dict[str, Any]) -> None:
        if self.state == "start":
            assert delta == {"role": "assistant", "content": ""}
            self.state = "open"
            return
        assert self.state == "open"
        assert "role" not in delta
        self.text += delta.get("content") or ""
        self.thinking += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(self.calls)
                assert call["id"] not in self.ids
                assert call["type"] == "function"
                self.ids.append(call["id"])
                self.calls.append((call["function"]["name"], ""))
            assert call["index"] == len(self.calls) - 1
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + call["function"]["arguments"])

    def finish(self) -> None:
        assert self.is_done, self.state
        if self.reason == "tool_calls":
            assert all(isinstance(json.loads(arguments or "{}"), dict) for _, arguments in self.calls)


class MessagesGrammar(Said):
    """Anthropic's: message_start, blocks one after the other, message_delta, message_stop; pings anywhere between; or an error."""

    _FITTING = {  # noqa: RUF012
        "text": {"text_delta"},
        "thinking": {"thinking_delta", "signature_delta"},
        "tool_use": {"input_json_delta"},
    }

    def __init__(self) -> None:
        super().__init__()
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


class ResponsesGrammar(Said):
    """OpenAI's Responses: created, in_progress, items one after the other, each with its parts, and the response as it ended; or error and
    failed. What is done has the text of its deltas, and the last response has the items that were done."""

    _NAMES = {  # noqa: RUF012
        "message": "output_text",
        "reasoning": "reasoning_text",
        "function_call": "function_call_arguments",
        "custom_tool_call": "custom_tool_call_input",
    }

    def __init__(self) -> None:
        super().__init__()
        self.num_events = 0
        self.items: list[dict[str, Any]] = []
        self.item: dict[str, Any] = {}
        self.said = ""
        self.response: dict[str, Any] = {}

    def feed(self, event: str, found: dict[str, Any]) -> None:
        assert event == found["type"], (event, found)
        assert found["sequence_number"] == self.num_events
        self.num_events += 1
        assert self.state != "end", found
        if event == "error":
            assert found["message"]
            self.state = "failing"
            return
        if self.state == "failing":
            assert event == "response.failed"
            assert found["response"]["error"]["message"]
            self.state = "end"
            return
        prefix, _, rest = event.partition(".")
        assert prefix == "response"
        kind = self._NAMES.get(self.item.get("type", ""), "")
        if kind and rest in (f"{kind}.delta", f"{kind}.done"):
            self._text(found, rest.endswith("done"))
        else:
            getattr(self, f"_{rest.replace('.', '_')}")(found)

    def _created(self, found: dict[str, Any]) -> None:
        assert self.state == "start"
        self.response = found["response"]
        assert self.response["id"].startswith("resp_")
        assert (self.response["status"], self.response["output"]) == ("in_progress", [])
        assert self.response["usage"] is None
        self.state = "created"

    def _in_progress(self, found: dict[str, Any]) -> None:
        assert self.state in ("created", "between")
        assert found["response"]["id"] == self.response["id"]
        self.state = "between"

    def _output_item_added(self, found: dict[str, Any]) -> None:
        assert self.state == "between"
        assert found["output_index"] == len(self.items)
        self.item, self.said = found["item"], ""
        assert self.item["status"] == "in_progress"
        assert self.item["id"] not in self.ids
        self.ids.append(self.item["id"])
        assert not self.item.get("content") and not self.item.get("arguments") and not self.item.get("input")  # noqa: PT018
        self.state = "item" if "call" not in self.item["type"] else "part"

    def _place(self, found: dict[str, Any]) -> None:
        assert found["item_id"] == self.item["id"]
        assert found["output_index"] == len(self.items)
        if "call" not in self.item["type"]:
            assert found["content_index"] == 0

    def _content_part_added(self, found: dict[str, Any]) -> None:
        assert self.state == "item"
        self._place(found)
        assert found["part"]["text"] == ""
        self.state = "part"

    def _text(self, found: dict[str, Any], is_done: bool) -> None:
        assert self.state == "part"
        self._place(found)
        if not is_done:
            assert self.said or found["delta"] or self.item["type"] == "custom_tool_call"
            self.said += found["delta"]
            return
        (whole,) = (found[name] for name in ("text", "arguments", "input") if name in found)
        assert whole == self.said
        self.state = "part done"

    def _content_part_done(self, found: dict[str, Any]) -> None:
        assert self.state == "part done"
        assert "call" not in self.item["type"]
        self._place(found)
        assert found["part"]["text"] == self.said
        self.state = "all parts"

    def _output_item_done(self, found: dict[str, Any]) -> None:
        item = found["item"]
        is_call = "call" in item["type"]
        assert self.state == ("part done" if is_call else "all parts")
        assert found["output_index"] == len(self.items)
        assert (item["id"], item["type"]) == (self.item["id"], self.item["type"])
        assert item["status"] in ("completed", "incomplete")
        if is_call:
            assert item["call_id"] == self.item["call_id"]
            assert item.get("arguments", item.get("input")) == self.said
            self.calls.append((item["name"], self.said))
        else:
            assert item["content"][0]["text"] == self.said
            if item["type"] == "message":
                self.text += self.said
            else:
                self.thinking += self.said
        self.items.append(item)
        self.item, self.state = {}, "between"

    def _completed(self, found: dict[str, Any]) -> None:
        assert self.state == "between"
        response = found["response"]
        assert response["status"] == found["type"].removeprefix("response.")
        assert response["id"] == self.response["id"]
        assert response["output"] == self.items
        assert response["usage"]["total_tokens"] > 0
        self.response = response
        self.state, self.is_done = "end", True

    _incomplete = _completed

    def finish(self) -> None:
        assert self.is_done, self.state
        statuses = [item["status"] for item in self.items]
        assert "incomplete" not in statuses[:-1]
        assert "incomplete" not in statuses or self.response["status"] == "incomplete"


class OllamaGrammar(Said):
    """Ollama's lines: objects with a piece of the answer each, and a last one that is done; or one with an error. tool_calls: as sent."""

    SEPARATOR = b"\n"

    def __init__(self) -> None:
        super().__init__()
        self.tool_calls: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}

    def _read(self, event: str) -> None:
        assert self.state != "end"
        found = json.loads(event)
        if "error" in found:
            assert isinstance(found["error"], str)
            self.state = "end"
            return
        assert found["model"]
        assert datetime.datetime.fromisoformat(found["created_at"]).tzinfo is not None
        message = found["message"]
        assert message["role"] == "assistant"
        self.text += message["content"]
        self.thinking += message.get("thinking", "")
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], dict)
            self.tool_calls.append(call)
            self.calls.append((call["function"]["name"], json.dumps(call["function"]["arguments"])))
        if found["done"]:
            assert not message["content"]
            assert found["done_reason"] in ("stop", "length")
            assert found["total_duration"] >= 0
            self.last, self.state, self.is_done = found, "end", True
        else:
            assert set(message) <= {
                "role",
                "content",
                "thinking",
                "tool_calls",
            }  # one that says nothing keeps alive
            assert "done_reason" not in found

    def finish(self) -> None:
        assert self.is_done


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
