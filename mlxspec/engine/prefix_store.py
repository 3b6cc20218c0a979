"""The prefix store: what was computed for texts, kept by their tokens in a radix tree, within a budget of bytes.

An edge holds a stretch of tokens with the keys and values of just these, so texts that begin alike share them. A node may hold a state:
what cannot be cut (recurrent states, windows), right for the text that ends there and for no other. Only a node with a state can be gone
on from. Parts are named: the target's, and each drafter's own. A drafter may have been there for the first tokens of a text only, or not
at all; for the others an edge can hold the target's hiddens, from which a drafter that wants those catches up without the target.

Invariants (a property test holds them): nbytes is the sum over what is in the tree and never above the budget; every leaf has a state, so
nothing is kept that no state needs. Least recently used states go first. Knows snapshots; knows no rows, no requests and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from mlxspec.cache.attention import KV, copied
from mlxspec.cache.model_cache import Snapshot

TARGET = "target"
_TOKEN_BYTES = 16  # of a token in an edge, about


Point = list[tuple[mx.array, ...]]  # of one part at a node: what is not kept token by token


@dataclass(kw_only=True, eq=False)
class Node:
    """tokens: of the edge that leads here. segments: keys and values of those, by part and layer; a part may lack. sources (n, H): the
    target's final hiddens that these tokens were sampled from, if kept. state: by part, the target's always. hidden (1, H): the target's
    of the last token, with a state only. used: when it was last gone on from or put."""

    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    segments: dict[str, list[KV]] = field(default_factory=dict)
    sources: mx.array | None = None
    state: dict[str, Point] | None = None
    hidden: mx.array | None = None
    used: int = 0

    @property
    def edge_bytes(self) -> int:
        kept = sum(x.nbytes for segment in self.segments.values() for kv in segment for x in kv)
        return kept + _bytes(self.sources) + _TOKEN_BYTES * len(self.tokens)

    @property
    def state_bytes(self) -> int:
        points = (self.state or {}).values()
        return _bytes(self.hidden) + sum(x.nbytes for point in points for arrays in point for x in arrays)


class Hit(NamedTuple):
    """What is known of a text's first `length` tokens: by part, a snapshot to restore, the target's of all of them and a drafter's of as
    many as there are; hidden (1, H) of the last of them. sources: by edge, see Node."""

    length: int
    parts: dict[str, Snapshot]
    hidden: mx.array
    sources: list[mx.array | None]

    def sources_from(self, start: int) -> mx.array | None:
        """The hiddens that tokens `start` to `length` were sampled from, (n, H); None where some are not known."""
        found: list[mx.array] = []
        for edge in reversed(self.sources):
            missing = self.length - start - sum(len(x) for x in found)
            if not missing:
                break
            if edge is None or len(edge) > missing:
                return None
            found.append(edge)
        return mx.concatenate(found[::-1]) if found else None


class PrefixStore:
    """See the module. Attributes: budget, nbytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._root = Node()
        self._clock = 0
        self._cuttable: set[str] = (
            set()
        )  # parts that have nothing but keys and values: any beginning of them will do

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
        names = dict.fromkeys(name for n in path for name in n.segments)
        parts = {name: found for name in names if (found := self._longest(path, name)) is not None}
        if node.hidden is None or parts[TARGET].length != length:
            raise RuntimeError("a state without its target is in no tree")
        return Hit(length, parts, node.hidden, [n.sources for n in path])

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
        path, common = self._with_branch(tokens)  # a part may lack on the very edge that the tokens end in
        found = dict.fromkeys(names, common)
        for name in names:
            at = 0
            for node in path:
                if name not in node.segments:
                    found[name] = at
                    break
                at += len(node.tokens)
        return found

    def covers(self, tokens: Sequence[int], names: Iterable[str], num_sources: int) -> bool:
        """Whether each of these parts could catch up to the end of `tokens`, if the last `num_sources` came with their sources."""
        heard = len(tokens) - num_sources
        end, unheard = 0, 0  # from `unheard` on there would be sources
        path, common = self._with_branch(tokens)
        for node in path:
            begin, end = end, min(end + len(node.tokens), common)
            if node.sources is None and begin < heard:
                unheard = end
        if common < min(heard, len(tokens)):
            unheard = len(tokens)
        return all(known >= unheard for known in self.starts(tokens, list(names)).values())

    def put(
        self,
        tokens: Sequence[int],
        parts: Mapping[str, Snapshot],
        hidden: mx.array,
        sources: mx.array | None = None,
    ) -> bool:
        """Keep the state behind `tokens`; False where it does not fit. parts: snapshots from `starts` on, not yet evaluated at best; one
        that lacks the tokens it should begin with is left out. sources (n, H): what the last n of the tokens were sampled from. Nothing is
        computed for what does not fit."""
        if not tokens or TARGET not in parts:
            return False
        path, common = self._with_branch(tokens)
        starts = self.starts(tokens, list(parts))
        parts = {n: s for n, s in parts.items() if s.start <= min(common, starts[n])}
        needed = hidden.nbytes + _bytes(sources) + _TOKEN_BYTES * len(tokens)
        needed += sum(s.nbytes for s in parts.values())
        if TARGET not in parts or needed > self.budget or not self._make_room(needed, path):
            return False
        self._cuttable |= {name for name, s in parts.items() if not any(s.point)}
        node = self._reach(tokens, parts, sources)
        self.nbytes -= node.state_bytes
        node.state = {name: s.point for name, s in parts.items()}
        node.hidden = hidden
        self.nbytes += node.state_bytes
        self._touch(node)
        for other in path:  # one may have lost its state, and its end be needed by nobody
            self._prune(other)
        mx.eval([x for point in node.state.values() for state in point for x in state], node.hidden)
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

    def _with_branch(self, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The same, the edge included that `tokens` leaves or ends in."""
        path, common = self._walk(tokens)
        at = sum(len(n.tokens) for n in path)
        if common > at:
            path.append((path[-1] if path else self._root).children[tokens[at]])
        return path, common

    def _longest(self, path: Sequence[Node], name: str) -> Snapshot | None:
        """Of a part, the snapshot of the longest beginning of the path's text that there is."""
        segments: list[list[KV]] = []
        best: tuple[int, int, Point] | None = None  # edges, tokens
        length = 0
        for node in path:
            if name not in node.segments:
                break
            segments.append(node.segments[name])
            length += len(node.tokens)
            if node.state is not None and name in node.state:
                best = len(segments), length, node.state[name]
            elif name in self._cuttable:
                best = len(segments), length, []
        return None if best is None else Snapshot(best[1], segments[: best[0]], best[2])

    def _reach(
        self, tokens: Sequence[int], parts: Mapping[str, Snapshot], sources: mx.array | None = None
    ) -> Node:
        """The node behind `tokens`, its edges filled from `parts` and `sources`; made where it is not there."""
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
        end, heard = 0, len(tokens) - (0 if sources is None else len(sources))
        for step in path:
            begin, end = end, end + len(step.tokens)
            if sources is not None and step.sources is None and heard <= begin:
                step.sources = copied(sources[begin - heard : end - heard])
                mx.eval(step.sources)
                self.nbytes += step.sources.nbytes
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
        if node.sources is not None:
            upper.sources, node.sources = copied(node.sources[:at]), copied(node.sources[at:])
            mx.eval(upper.sources, node.sources)
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


def _bytes(x: mx.array | None) -> int:
    return 0 if x is None else x.nbytes


def _cut(snapshot: Snapshot, begin: int, end: int) -> list[KV]:
    """Keys and values of tokens begin to end, in memory of their own."""
    (segment,) = snapshot.segments
    if (begin, end) == (snapshot.start, snapshot.length):
        return segment
    low, high = begin - snapshot.start, end - snapshot.start
    return [(copied(k[:, :, low:high]), copied(v[:, :, low:high])) for k, v in segment]
