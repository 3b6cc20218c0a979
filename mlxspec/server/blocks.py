"""Turns a growing answer into events of its blocks (thinking, text, tool calls), from which every API's stream is written.

    BlockBegin   a block opens; no other is open
    BlockMore    text of the open block: thinking, text, or the JSON of a call's arguments
    BlockEnd     the open block is complete

The module depends on the updates of a job and on no API.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from mlxspec.events import TokenLogprob
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from mlxspec.parsers.values import loads
from mlxspec.server.job_run import Delta, End

BlockKind = Literal["thinking", "text", "call"]


@dataclass(kw_only=True)
class Block:
    """A part of an answer: thinking, text, or one tool call. number: its place among the answer's blocks. text: its text so far; for a
    call, its arguments as JSON text. call_id, name: of a call, else empty."""

    number: int
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call as an object. Text that is no JSON object, because the answer was cut, becomes the object's
        member `arguments`."""
        found = loads(self.text or "{}")
        return found if isinstance(found, dict) else {"arguments": self.text}

    def custom_input(self) -> str:
        """Return the text that a custom tool is called with: the member `input` of the call's arguments."""
        found = self.arguments().get("input")
        return found if isinstance(found, str) else self.text


@dataclass(frozen=True)
class BlockBegin:
    """The event that `block` has been opened."""

    block: Block


@dataclass(frozen=True)
class BlockMore:
    """The event that `text` has been added to `block`."""

    block: Block
    text: str


@dataclass(frozen=True)
class BlockEnd:
    """The event that `block` is complete."""

    block: Block


BlockEvent = BlockBegin | BlockMore | BlockEnd


class Answer:
    """One answer as it grows. number: its place among the answers of the request. blocks: its parts so far. logprobs, tokens: of all
    text so far. num_thinking: the number of tokens that produced nothing but thinking. end: the update that completed the answer;
    None before. call_prefix: the beginning of the ids of calls."""

    def __init__(self, number: int = 0, call_prefix: str = "call_") -> None:
        self.number, self._prefix = number, call_prefix
        self.blocks: list[Block] = []
        self.logprobs: list[TokenLogprob] = []
        self.tokens: list[int] = []
        self.num_thinking = 0
        self.end: End | None = None
        self._open: Block | None = None

    def take(self, update: Delta) -> list[tuple[int, BlockEvent]]:
        """Add an update to the answer, and return the events of its blocks, each with the place of the update's piece that caused it."""
        self.logprobs += update.logprobs
        self.tokens += update.tokens
        was_thinking = self._open is not None and self._open.kind == "thinking"
        if all(isinstance(p, Reasoning) for p in update.pieces) if update.pieces else was_thinking:
            self.num_thinking += len(update.tokens)
        return [(place, event) for place, piece in enumerate(update.pieces) for event in self._push(piece)]

    def close(self) -> list[BlockEvent]:
        """Close the open block, and return its end as a list of one event; empty where no block is open."""
        block, self._open = self._open, None
        return [] if block is None else [BlockEnd(block)]

    def text(self, kind: BlockKind) -> str:
        """Return the joined text of all blocks of this kind."""
        return "".join(b.text for b in self.blocks if b.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [b for b in self.blocks if b.kind == "call"]

    def _push(self, piece: Piece) -> list[BlockEvent]:
        if isinstance(piece, CallStart):
            call_id = f"{self._prefix}{secrets.token_hex(12)}"
            return [*self.close(), self._begin("call", call_id=call_id, name=piece.name)]
        if not piece.text:
            return []
        begun: list[BlockEvent] = []
        kind: BlockKind = (
            "thinking" if isinstance(piece, Reasoning) else "text" if isinstance(piece, Content) else "call"
        )
        if isinstance(piece, CallArguments):
            if self._open is None or self._open.kind != "call" or piece.index != len(self.calls) - 1:
                raise RuntimeError("arguments of a call that is not open")
        elif self._open is None or self._open.kind != kind:
            begun = [*self.close(), self._begin(kind)]
        block = self.blocks[-1]
        block.text += piece.text
        return [*begun, BlockMore(block, piece.text)]

    def _begin(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> BlockBegin:
        self._open = Block(number=len(self.blocks), kind=kind, call_id=call_id, name=name)
        self.blocks.append(self._open)
        return BlockBegin(self._open)
