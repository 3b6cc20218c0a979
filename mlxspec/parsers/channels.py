"""Splits an answer of gpt-oss, which is written in channels, into reasoning, content and tool calls.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

A message of the channel `analysis` is reasoning, one that goes to a function is a call, all others are content. Arguments are given when
they are whole: what is no JSON object is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Scanner,
    Trimmer,
    cut_notice,
    merged,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_TO = re.compile(r"\bto=functions\.([\w.-]+)")


class ChannelParser:
    """A parser of one answer in gpt-oss's channels into pieces. tools: the request's tools, in OpenAI's form; a call of any other tool
    is content."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._names = {t["function"]["name"] for t in tools}
        self._scanner, self._space = Scanner(), Trimmer()
        self._head: str | None = ""  # in front of a message; None inside one
        self._name: str | None = None  # of the function that the message goes to
        self._body: list[str] = []
        self._is_thought = False
        self._num_calls = self._num_messages = 0
        self.cut_call = ""  # text of a call that a limit cut

    @property
    def notices(self) -> tuple[str, ...]:
        """Return notices for the client: one on a tool call that a limit cut, else none. No other text can be lost, because each
        message's channel names its kind."""
        return cut_notice(self.cut_call)

    @property
    def num_held(self) -> int:
        return sum(map(len, self._body)) if self._name is not None else 0

    @property
    def is_thinking(self) -> bool:
        return self._head is None and self._is_thought

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        while True:
            text, tag = self._scanner.take(TAGS)
            if self._head is None:
                pieces += self._inside(text)
            elif self._head or self._num_messages:
                self._head += text
            else:
                pieces.append(Content(text))  # of an answer without channels
            if tag is None:
                return merged(pieces)
            if tag == MESSAGE:
                self._open()
            elif tag in ENDS:
                pieces += self._close()
            elif self._head is not None:
                self._head += tag

    def _open(self) -> None:
        head, self._head = self._head or "", None
        found = _TO.search(head)
        self._name = found[1] if found and found[1] in self._names else None
        self._is_thought = self._name is None and CHANNEL + "analysis" in head
        self._body, self._space = [], Trimmer()
        self._num_messages += 1

    def _inside(self, text: str) -> list[Piece]:
        if self._name is not None:
            self._body.append(text)
            return []
        return [Reasoning(self._space.push(text)) if self._is_thought else Content(text)]

    def _close(self) -> list[Piece]:
        name, body = self._name, "".join(self._body)
        self._head, self._name, self._body, self._is_thought = "", None, [], False
        if name is None:
            return []
        try:
            is_object = isinstance(json.loads(body), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            return [Content(body)]
        self._num_calls += 1
        return [CallStart(self._num_calls - 1, name), CallArguments(self._num_calls - 1, body.strip())]

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the answer, and return the pieces of the text that was held back. cut: the answer ended at a limit, so that an incomplete
        call or tag is left out."""
        rest = self._scanner.rest()
        if self._head is not None:
            return [] if cut or self._num_messages or self._head else [Content(rest)]
        if self._name is None:
            return [] if cut else self._inside(rest)
        self._body.append(rest)
        if cut:
            self.cut_call = f"{self._name} {''.join(self._body)}"
        return [] if cut else self._close()
