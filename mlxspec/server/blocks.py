"""The blocks of an answer: thinking, text and tool calls, one after the other, as events that every API's stream is written from.

    BlockBegin   a block opens; no other is open
    BlockMore    text of the open block: thinking, text, or the JSON of a call's arguments
    BlockEnd     the open block is complete

Knows the parsers' pieces; knows no API.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from mlxspec.parsers.values import loads

BlockKind = Literal["thinking", "text", "call"]


@dataclass(kw_only=True)
class Block:
    """number: its place among the answer's blocks. text: what it holds so far, of a call its arguments as JSON text. call_id, name: of a
    call."""

    number: int
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""

    def arguments(self) -> dict[str, Any]:
        """Of a call, as an object. Text that is none, because the answer was cut, is its member `arguments`."""
        found = loads(self.text or "{}")
        return found if isinstance(found, dict) else {"arguments": self.text}


@dataclass(frozen=True)
class BlockBegin:
    """`block` has been opened."""

    block: Block


@dataclass(frozen=True)
class BlockMore:
    """`text` has been added to `block`."""

    block: Block
    text: str


@dataclass(frozen=True)
class BlockEnd:
    """`block` will not change any more."""

    block: Block


BlockEvent = BlockBegin | BlockMore | BlockEnd


class Blocks:
    """Makes blocks of pieces. `all`: the blocks so far. call_prefix: what ids of calls begin with."""

    def __init__(self, call_prefix: str = "call_") -> None:
        self._prefix = call_prefix
        self._open: Block | None = None
        self._num_calls = 0
        self.all: list[Block] = []

    def push(self, pieces: Sequence[Piece]) -> Iterator[BlockEvent]:
        """Iterate to the end: what is not iterated has not been taken."""
        for piece in pieces:
            if isinstance(piece, CallStart):
                yield from self.close()
                call_id = f"{self._prefix}{secrets.token_hex(12)}"
                yield self._begin("call", call_id=call_id, name=piece.name)
                self._num_calls += 1
            elif piece.text:
                yield from self._add(piece)

    def close(self) -> Iterator[BlockEvent]:
        """The end of the open block, if one is open."""
        block, self._open = self._open, None
        if block is not None:
            yield BlockEnd(block)

    def text(self, kind: BlockKind) -> str:
        """All text of this kind."""
        return "".join(b.text for b in self.all if b.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [b for b in self.all if b.kind == "call"]

    @property
    def is_thinking(self) -> bool:
        """Whether the open block is thinking."""
        return self._open is not None and self._open.kind == "thinking"

    def _add(self, piece: Content | Reasoning | CallArguments) -> Iterator[BlockEvent]:
        kind: BlockKind = (
            "thinking" if isinstance(piece, Reasoning) else "text" if isinstance(piece, Content) else "call"
        )
        if isinstance(piece, CallArguments):
            if self._open is None or self._open.kind != "call" or piece.index != self._num_calls - 1:
                raise RuntimeError("arguments of a call that is not open")
        elif self._open is None or self._open.kind != kind:
            yield from self.close()
            yield self._begin(kind)
        block = self._open
        if block is not None:
            block.text += piece.text
            yield BlockMore(block, piece.text)

    def _begin(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> BlockBegin:
        self._open = Block(number=len(self.all), kind=kind, call_id=call_id, name=name)
        self.all.append(self._open)
        return BlockBegin(self._open)
