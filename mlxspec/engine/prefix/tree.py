"""The prefix cache in memory: states after texts, with the keys and values that lead to them, within a budget of bytes.

A *state* holds what a model keeps after a text and cannot cut: recurrent states and windows. It is right for that text and no other, so a
prompt continues from the longest of its beginnings that has a state. A node of the tree holds one state, and the keys and values of the
tokens between its parent and itself. Its parent is the node of the longest beginning that was there when it was put; so texts with the same
beginning share the keys and values up to a common state. A node is found by a digest of owner, adapters and tokens: owners never share
nodes.

The parts of a node are the target's and each drafter's own. A drafter that needs the target's hidden states of all tokens cannot continue
without its part, so a request continues only from a node that has the parts of all such drafters of its own.

Eviction. An *anchor* is a state where texts are expected to branch off: the end of a system prompt, of a turn, of an answer, and each state
that a text has continued from. Other states inside a long prompt are dropped first; among equals the least recently used is dropped first.
A state that is no anchor never drops an anchor, and an anchor does so only if its whole text fits into the budget by itself. A node whose
state was dropped stays while other nodes need its keys and values.

Invariants (property tests check them): `nbytes` is the sum over all nodes and at most the budget; every node without children has a state;
`put` returns True and the state is there, or False and it is not, with anchors as they were; an anchor whose text fits by itself is kept.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.cache.attention import KV, copied
from mlxspec.cache.snapshot import Snapshot

TARGET = "the target"  # a part; no drafter bears this name, for names have no spaces
Point = list[tuple[mx.array, ...]]  # the arrays of a part that are not kept token by token


class KeyedText:
    """A text whose beginnings have keys: digests of 32 bytes over owner, adapter scales and tokens. tokens: may grow at the end."""

    def __init__(self, tokens: Sequence[int], owner: str = "", scales: Sequence[float] = ()) -> None:
        self.tokens, self.owner = tokens, owner
        self._ends = [0]
        self._hashes: list[Any] = [hashlib.sha256(repr((owner, tuple(scales))).encode())]

    def __len__(self) -> int:
        return len(self.tokens)

    def key(self, length: int) -> bytes:
        """Return the key of the first `length` tokens. Hashes only the tokens after the nearest shorter length that was requested
        before."""
        at = bisect_right(self._ends, length)
        begin, found = self._ends[at - 1], self._hashes[at - 1]
        if begin < length:
            found = found.copy()
            found.update(np.asarray(self.tokens[begin:length], np.int64).tobytes())
            self._ends.insert(at, length)
            self._hashes.insert(at, found)
        key: bytes = found.digest()
        return key


class NodePart(NamedTuple):
    """The part of a node that belongs to the target or to one drafter. kv: keys and values of the tokens from `start` to the node's end,
    by layer. point: the arrays that are not kept for each token; None after the state has been dropped, empty for a part that has
    only keys and values."""

    start: int
    kv: list[KV]
    point: Point | None

    @property
    def kv_bytes(self) -> int:
        return sum(x.nbytes for kv in self.kv for x in kv)

    @property
    def point_bytes(self) -> int:
        return sum(x.nbytes for arrays in self.point or () for x in arrays)


@dataclass(kw_only=True, eq=False)
class Node:
    """A node of the tree: the state after one text, and the keys and values of the tokens since the parent. length: tokens of the text.
    pieces: by part. hidden (1, H): the target's final hidden state of the last token; None after the state has been dropped. used: a
    counter's value at the state's last use."""

    key: bytes
    length: int
    parent: Node | None
    pieces: dict[str, NodePart] = field(default_factory=dict)
    hidden: mx.array | None = None
    used: int = 0
    is_anchor: bool = False
    num_children: int = 0

    def has(self, needed: Collection[str]) -> bool:
        """Return whether a text can continue from this node with these parts. needed: names of drafters; the target's part is always
        needed."""
        parts = (self.pieces.get(name) for name in needed)
        return self.hidden is not None and all(p is not None and p.point is not None for p in parts)

    @property
    def state_bytes(self) -> int:
        return _bytes(self.hidden) + sum(piece.point_bytes for piece in self.pieces.values())

    @property
    def nbytes(self) -> int:
        return self.state_bytes + sum(piece.kv_bytes for piece in self.pieces.values())


class Hit(NamedTuple):
    """The state after the first `length` tokens of a text. parts: snapshots by part; the target's covers all tokens, a drafter's may
    cover fewer. hidden (1, H): the target's final hidden state of the last token."""

    length: int
    parts: dict[str, Snapshot]
    hidden: mx.array


class PrefixTree:
    """The prefix cache in memory: a tree of states within a budget. A state is what the target and its drafters need to continue a text:
    keys and values, recurrent states and windows. An anchor is a state after which texts are expected to branch off; other states are
    dropped before it. Attributes: budget and nbytes, both in bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._nodes: dict[bytes, Node] = {}
        self._lengths: Counter[int] = Counter()
        self._clock = 0

    @property
    def states(self) -> list[Node]:
        """Return the nodes that a text can continue from."""
        return [node for node in self._nodes.values() if node.hidden is not None]

    def find(self, text: KeyedText, needed: Collection[str] = ()) -> Hit | None:
        """Return the state of the longest beginning of `text` that has one with the parts in `needed`; None where there is none. The
        state counts as used and becomes an anchor."""
        found = next((n for n in reversed(self._path(text, len(text))) if n.has(needed)), None)
        if found is None:
            return None
        found.is_anchor = True
        self._touch(found)
        return self.hit(found)

    def depth(self, text: KeyedText, length: int, needed: Collection[str] = ()) -> int:
        """Return the length in tokens of the longest beginning, among the first `length` tokens of `text`, that has a state with the
        parts in `needed`; 0 where there is none."""
        return max((n.length for n in self._path(text, length) if n.has(needed)), default=0)

    def state(self, key: bytes) -> Node | None:
        """Return the node of this key; None where there is none with a state. The state does not count as used."""
        found = self._nodes.get(key)
        return None if found is None or found.hidden is None else found

    def hit(self, node: Node) -> Hit:
        """Return the state of a node, with the keys and values of its whole text. Raises ValueError if the state has been dropped."""
        if node.hidden is None:
            raise ValueError("the state has been dropped")
        line = list(_line(node))
        names = dict.fromkeys(name for step in line for name in step.pieces)
        parts = {name: found for name in names if (found := _longest(line, name)) is not None}
        return Hit(node.length, parts, node.hidden)

    def starts(self, text: KeyedText, length: int, names: Iterable[str]) -> dict[str, int]:
        """Return for each part in `names` how many of the first `length` tokens have their keys and values in the tree already. A
        snapshot for `put` needs only the tokens after them."""
        line = self._line_of(text, length)
        return {name: next((n.length for n in line if name in n.pieces), 0) for name in names}

    def put(
        self,
        text: KeyedText,
        length: int,
        parts: Mapping[str, Snapshot],
        hidden: mx.array,
        *,
        is_anchor: bool = True,
    ) -> bool:
        """Keep the state after the first `length` tokens of a text, and return True; return False where it does not fit into the budget.

        parts: snapshots by part, each from the place that `starts` returns or an earlier one; a part that begins later is left out. They
        need not be evaluated, and nothing is computed for a state that does not fit. hidden (1, H): the target's final hidden state of
        the last token. is_anchor: whether texts are expected to branch off after this state; one that is no anchor drops no anchors.
        Where evaluating raises, the state is not kept and the tree stays valid, but other states may have been dropped.
        """
        starts = self.starts(text, length, parts)
        pieces = {name: _piece(s, starts[name]) for name, s in parts.items() if s.start <= starts[name]}
        if not length or TARGET not in pieces:
            return False
        line = self._line_of(text, length)
        key = text.key(length)
        old = self._nodes.get(key)
        parent = line[0] if line and old is None else None if old is None else old.parent
        for name, piece in (
            () if old is None else old.pieces.items()
        ):  # keys and values that are there stay as they are
            pieces[name] = piece._replace(point=pieces[name].point) if name in pieces else piece
        if old is not None and old.hidden is not None and old.hidden.shape[1] > hidden.shape[1]:
            hidden = old.hidden  # with residual streams, which a part that is there may need
        new = Node(key=key, length=length, parent=parent, pieces=pieces, hidden=hidden)
        new.is_anchor = is_anchor or (old is not None and old.hidden is not None and old.is_anchor)
        alone = new.nbytes + sum(node.nbytes - node.state_bytes for node in _line(parent))
        growth = new.nbytes - (0 if old is None else old.nbytes)
        may_drop_anchors = is_anchor and alone <= self.budget
        if not self._make_room(growth, may_drop_anchors, line, but=old):
            self._prune(line[0] if line else None)
            return False
        try:
            mx.eval([x for p in pieces.values() for kv in p.kv for x in kv])
            mx.eval([x for p in pieces.values() for arrays in p.point or () for x in arrays], hidden)
        except BaseException:
            self._prune(line[0] if line else None)
            raise
        if old is None:
            self._nodes[key] = old = new
            self._lengths[length] += 1
            if parent is not None:
                parent.num_children += 1
        else:
            old.pieces, old.hidden, old.is_anchor = pieces, hidden, new.is_anchor
        self.nbytes += growth
        self._touch(old)
        return True

    def shrink(self, nbytes: int) -> int:
        """Drop states until at most `nbytes` bytes are held; return how many bytes were dropped."""
        before = self.nbytes
        self._make_room(self.budget - max(0, nbytes), True)
        return before - self.nbytes

    def clear(self) -> None:
        """Drop all nodes."""
        self._nodes, self._lengths, self.nbytes = {}, Counter(), 0

    def check(self) -> None:
        """Raise AssertionError where an invariant of the tree does not hold. For tests."""
        nodes = self._nodes
        assert sum(node.nbytes for node in nodes.values()) == self.nbytes <= self.budget
        assert Counter(node.length for node in nodes.values()) == +self._lengths
        assert Counter(node.parent.key for node in nodes.values() if node.parent) == Counter(
            {key: node.num_children for key, node in nodes.items() if node.num_children}
        )
        for key, node in nodes.items():
            assert node.key == key
            assert node.num_children or node.hidden is not None, "a leaf without a state"
            assert node.parent is None or nodes[node.parent.key] is node.parent, "a parent that is gone"
            assert TARGET in node.pieces
            for piece_start, name in ((piece.start, name) for name, piece in node.pieces.items()):
                reached = {n.length for n in _line(node.parent) if name in n.pieces}
                assert piece_start == 0 or piece_start in reached, "keys and values that lead nowhere"

    # --- the tree

    def _path(self, text: KeyedText, length: int) -> list[Node]:
        """Return the nodes of all beginnings among the first `length` tokens of a text, the shortest first."""
        lengths = sorted(num for num in self._lengths if num <= length)
        return [node for num in lengths if (node := self._nodes.get(text.key(num))) is not None]

    def _line_of(self, text: KeyedText, length: int) -> list[Node]:
        """Return the node of the longest beginning among the first `length` tokens of a text, then its ancestors up to the root."""
        path = self._path(text, length)
        return list(_line(path[-1])) if path else []

    def _touch(self, node: Node) -> None:
        """Count a node's state as used now, and those of its ancestors that other texts share."""
        for step in reversed(list(_line(node))):
            if step is node or step.num_children > 1:
                self._clock += 1
                step.used = self._clock

    # --- the budget

    def _make_room(
        self, growth: int, may_drop_anchors: bool, kept: Collection[Node] = (), but: Node | None = None
    ) -> bool:
        """Drop states until `growth` more bytes fit into the budget, and return whether they do. may_drop_anchors: whether anchors may
        be dropped. kept: nodes that stay even without a state. but: a node whose state is not dropped."""
        held = [node for node in self.states if node is not but and (may_drop_anchors or not node.is_anchor)]
        for node in sorted(held, key=lambda n: (n.is_anchor, n.used)):
            if self.nbytes + growth <= self.budget:
                break
            self._drop(node, kept)
        return self.nbytes + growth <= self.budget

    def _drop(self, node: Node, kept: Collection[Node]) -> None:
        """Drop a node's state, and the nodes that only this state needed. kept: nodes that stay."""
        self.nbytes -= node.state_bytes
        node.hidden, node.is_anchor = None, False
        node.pieces = {name: p._replace(point=None) if p.point else p for name, p in node.pieces.items()}
        self._prune(node, kept)

    def _prune(self, node: Node | None, kept: Collection[Node] = ()) -> None:
        """Remove a node without a state and without children, and then each ancestor that became such a node. kept: nodes that stay."""
        while node is not None and not node.num_children and node.hidden is None and node not in kept:
            self.nbytes -= node.nbytes
            del self._nodes[node.key]
            self._lengths[node.length] -= 1
            if not self._lengths[node.length]:
                del self._lengths[node.length]
            node = node.parent
            if node is not None:
                node.num_children -= 1


def _line(node: Node | None) -> Iterator[Node]:
    """Yield a node, then its ancestors up to the root."""
    while node is not None:
        yield node
        node = node.parent


def _longest(line: Sequence[Node], name: str) -> Snapshot | None:
    """Return a part's snapshot of the longest beginning for which it is complete; None where there is none. line: a node and its
    ancestors. name: of the part."""
    end, segments, length, point = -1, [], 0, None
    for node in line:
        piece = node.pieces.get(name)
        if (
            piece is None
            or (point is None and piece.point is None)
            or (point is not None and node.length != end)
        ):
            continue
        if point is None:
            length, point = node.length, piece.point
        segments.append(piece.kv)
        end = piece.start
        if not end:
            break
    return None if point is None else Snapshot(length, segments[::-1], point)


def _piece(snapshot: Snapshot, start: int) -> NodePart:
    """Return the part of a node that holds a snapshot's keys and values from token `start` on, copied into memory of its own where the
    snapshot begins earlier."""
    (segment,) = snapshot.segments
    if start > snapshot.start:
        segment = [tuple(copied(x[:, :, start - snapshot.start :]) for x in kv) for kv in segment]
    return NodePart(start, segment, snapshot.point)


def _bytes(x: mx.array | None) -> int:
    return 0 if x is None else x.nbytes
