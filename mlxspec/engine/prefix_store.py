"""The prefix store: what was computed for texts, kept by their tokens in a radix tree, within a budget of bytes.

An edge holds a stretch of tokens with the keys and values of just these, so texts that begin alike share them. A node may hold a state:
what cannot be cut (recurrent states, windows, a drafter's place), right for the text that ends there and for no other. Only a node with
a state can be gone on from. Parts are named: the target's, and each drafter's own.

Invariants (a property test holds them): nbytes is the sum over what is in the tree and never above the budget; every leaf has a state, so
nothing is kept that no state needs. Least recently used states go first. Knows snapshots; knows no rows, no requests and no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from mlxspec.cache.attention import KV, copied
from mlxspec.cache.model_cache import Snapshot

TARGET = "target"
_TOKEN_BYTES = 16  # of a token in an edge, about


class Place(NamedTuple):
    """One part's state at a node: what is not kept token by token, and the token before which the part never ran."""

    point: list[tuple[mx.array, ...]]
    first: int


@dataclass(kw_only=True, eq=False)
class Node:
    """tokens: of the edge that leads here. segments: keys and values of those, by part and layer; a part may lack. hidden (1, H): the
    target's final hidden of the last token, with a state only. used: when it was last gone on from or put."""

    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    segments: dict[str, list[KV]] = field(default_factory=dict)
    state: dict[str, Place] | None = None
    hidden: mx.array | None = None
    used: int = 0

    @property
    def edge_bytes(self) -> int:
        kept = sum(x.nbytes for segment in self.segments.values() for kv in segment for x in kv)
        return kept + _TOKEN_BYTES * len(self.tokens)

    @property
    def state_bytes(self) -> int:
        places = (self.state or {}).values()
        own = 0 if self.hidden is None else self.hidden.nbytes
        return own + sum(x.nbytes for place in places for arrays in place.point for x in arrays)


class Hit(NamedTuple):
    """What is known of a text's first `length` tokens: snapshots to restore by part, and hidden (1, H) of the last of them."""

    length: int
    parts: dict[str, Snapshot]
    hidden: mx.array


class PrefixStore:
    """See the module. Attributes: budget, nbytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._root = Node()
        self._clock = 0

    @property
    def num_states(self) -> int:
        return sum(node.state is not None for node in self._nodes())

    def find(self, tokens: Sequence[int]) -> Hit | None:
        """The longest beginning of `tokens` that has a state. It counts as used."""
        path, _ = self._walk(tokens)
        while path and path[-1].state is None:
            path.pop()
        if not path:
            return None
        node, length = path[-1], sum(len(n.tokens) for n in path)
        self._touch(node)
        parts = {}
        for name, place in (node.state or {}).items():
            segments = _joinable(path, name, place.first)
            if segments is not None:
                parts[name] = Snapshot(length, segments, place.point, place.first, place.first)
        if node.hidden is None or TARGET not in parts:
            raise RuntimeError("a state without its target is in no tree")
        return Hit(length, parts, node.hidden)

    def depth(self, tokens: Sequence[int]) -> int:
        """Length of the longest beginning that has a state."""
        depth, at = 0, 0
        for node in self._walk(tokens)[0]:
            at += len(node.tokens)
            if node.state is not None:
                depth = at
        return depth

    def starts(self, tokens: Sequence[int], names: Sequence[str]) -> dict[str, int]:
        """By part, how many of the first tokens need no keys and values any more: a snapshot for `put` begins there."""
        path, common = self._walk(tokens)
        found = dict.fromkeys(names, common)
        for name in names:
            at = 0
            for node in path:
                if name not in node.segments:
                    found[name] = at
                    break
                at += len(node.tokens)
        return found

    def put(self, tokens: Sequence[int], parts: Mapping[str, Snapshot], hidden: mx.array) -> bool:
        """Keep the state behind `tokens`; False where it does not fit. parts: snapshots from `starts` on, not yet evaluated at best; one
        that lacks the tokens it should begin with is left out. Nothing is computed for what does not fit."""
        if not tokens or TARGET not in parts:
            return False
        path, common = self._walk(tokens)
        at = sum(len(n.tokens) for n in path)
        if common > at:
            path.append((path[-1] if path else self._root).children[tokens[at]])
        starts = self.starts(tokens, list(parts))
        parts = {n: s for n, s in parts.items() if s.start <= min(common, max(starts[n], s.first))}
        needed = hidden.nbytes + _TOKEN_BYTES * len(tokens) + sum(s.nbytes for s in parts.values())
        if TARGET not in parts or needed > self.budget or not self._make_room(needed, path):
            return False
        node = self._reach(tokens, parts)
        self.nbytes -= node.state_bytes
        node.state = {name: Place(s.point, s.first) for name, s in parts.items()}
        node.hidden = hidden
        self.nbytes += node.state_bytes
        self._touch(node)
        for other in path:  # one may have lost its state, and its end be needed by nobody
            self._prune(other)
        mx.eval([x for place in node.state.values() for state in place.point for x in state], node.hidden)
        return True

    def shrink(self, nbytes: int) -> int:
        """Let states go until no more than `nbytes` are held; returns how many were let go of."""
        before = self.nbytes
        while self.nbytes > max(0, nbytes) and self._drop_oldest():
            pass
        return before - self.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._root, self.nbytes = Node(), 0

    def check(self) -> None:
        """Raises AssertionError where the invariants do not hold; for tests."""
        total = 0
        for node in self._nodes():
            total += node.edge_bytes + node.state_bytes
            assert node.tokens, "an empty edge"
            assert node.children or node.state is not None, "a leaf without a state"
            assert node.parent is not None, "a node without a parent"
            assert node.parent.children.get(node.tokens[0]) is node, "a node its parent does not know"
            assert TARGET in node.segments, "an edge without the target's part"
        assert total == self.nbytes, f"{self.nbytes} bytes are counted, {total} are held"
        assert self.nbytes <= self.budget, "above the budget"

    # --- the tree

    def _nodes(self) -> Iterator[Node]:
        """All but the root."""
        open_ = list(self._root.children.values())
        while open_:
            node = open_.pop()
            yield node
            open_ += node.children.values()

    def _walk(self, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """Nodes whose whole edges `tokens` begins with, in order, and how many tokens are in the tree, part of an edge included."""
        path: list[Node] = []
        node, at = self._root, 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            same = _num_same(child.tokens, tokens, at)
            at += same
            if same < len(child.tokens):
                break
            path.append(child)
            node = child
        return path, at

    def _reach(self, tokens: Sequence[int], parts: Mapping[str, Snapshot]) -> Node:
        """The node behind `tokens`, its edges filled from `parts`; made where it is not there."""
        path, common = self._walk(tokens)
        at = sum(len(n.tokens) for n in path)
        node = path[-1] if path else self._root
        if common > at:
            node = self._split(node.children[tokens[at]], common - at)
            path.append(node)
        if common < len(tokens):
            leaf = Node(tokens=tuple(tokens[common:]), parent=node)
            node.children[leaf.tokens[0]] = leaf
            node = leaf
            path.append(leaf)
            self.nbytes += leaf.edge_bytes
        end = 0
        for step in path:
            begin, end = end, end + len(step.tokens)
            for name, snapshot in parts.items():
                if name not in step.segments and snapshot.start <= begin:
                    before = step.edge_bytes
                    step.segments[name] = _cut(snapshot, begin, end)
                    mx.eval(step.segments[name])
                    self.nbytes += step.edge_bytes - before
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge behind its first `at` tokens; returns the new node there."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root has no edge")
        upper = Node(tokens=node.tokens[:at], parent=parent, used=node.used)
        self.nbytes -= node.edge_bytes
        for name, layers in node.segments.items():
            upper.segments[name] = [(copied(k[:, :, :at]), copied(v[:, :, :at])) for k, v in layers]
            node.segments[name] = [(copied(k[:, :, at:]), copied(v[:, :, at:])) for k, v in layers]
            mx.eval(upper.segments[name], node.segments[name])
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[node.tokens[0]] = node
        parent.children[upper.tokens[0]] = upper
        self.nbytes += node.edge_bytes + upper.edge_bytes
        return upper

    # --- the budget

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _make_room(self, needed: int, path: Sequence[Node]) -> bool:
        """Let states go until so many bytes fit beside the edges of `path`, which stay."""
        pinned = set(map(id, path))
        while self.nbytes + needed > self.budget:
            if not self._drop_oldest(pinned):
                for node in path:
                    self._prune(node)
                return False
        return True

    def _drop_oldest(self, pinned: Set[int] = frozenset()) -> bool:
        """Let go of the least recently used state, and of the edges that only it needed. pinned: ids of nodes whose edges stay."""
        held = [n for n in self._nodes() if n.state is not None]
        if not held:
            return False
        node = min(held, key=lambda n: n.used)
        self.nbytes -= node.state_bytes
        node.state = node.hidden = None
        self._prune(node, pinned)
        return True

    def _prune(self, node: Node, pinned: Set[int] = frozenset()) -> None:
        """Take an edge away that nothing needs, and those before it that only it needed."""
        while node.parent is not None and not node.children and node.state is None and id(node) not in pinned:
            self.nbytes -= node.edge_bytes
            del node.parent.children[node.tokens[0]]
            node = node.parent


def _num_same(edge: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
    """How many tokens of the edge `tokens` goes on with behind its first `at`."""
    given = tuple(tokens[at : at + len(edge)])
    if given == edge:
        return len(edge)
    return next((i for i, (a, b) in enumerate(zip(edge, given, strict=False)) if a != b), len(given))


def _joinable(path: Sequence[Node], name: str, first: int) -> list[list[KV]] | None:
    """A part's segments from token `first` to the end of the path; None where an edge lacks them."""
    found, at = [], 0
    for node in path:
        if at >= first:
            if name not in node.segments:
                return None
            found.append(node.segments[name])
        at += len(node.tokens)
        if at > first and not found:
            return None  # `first` is no longer where an edge begins
    return found


def _cut(snapshot: Snapshot, begin: int, end: int) -> list[KV]:
    """Keys and values of tokens begin to end, in memory of their own."""
    (segment,) = snapshot.segments
    if (begin, end) == (snapshot.start, snapshot.length):
        return segment
    low, high = begin - snapshot.start, end - snapshot.start
    return [(copied(k[:, :, low:high]), copied(v[:, :, low:high])) for k, v in segment]
