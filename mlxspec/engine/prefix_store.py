"""The prefix store: keys, values and recurrent states of earlier texts, in a radix tree over their tokens, within a budget of bytes.

An edge holds a stretch of tokens with the keys and values of just these, so texts that begin alike share them. A node may hold a state:
what cannot be cut (recurrent states, windows), right for the text that ends there and for no other. Only a node with a state can be gone
on from. Parts are named: the target's, and each drafter's own. A drafter may have been there for the first tokens of a text only, or not
at all; for the others an edge can hold the target's hiddens, from which a drafter that wants those catches up without the target.

Eviction. Two kinds of states are kept. An *anchor* is a state at a place where a text ends or where other texts are expected to branch
off: the end of a system prompt, of a turn, of an answer. A *waypoint* is a state inside a long prompt, for texts that may branch off where
nobody expects it. A waypoint that a text is found to go on from becomes an anchor.
`put` computes what it must drop before it drops anything. States are dropped in this order, least recently used first in each group:
  1. waypoints of the text that is put,
  2. waypoints of other texts,
  3. anchors.
Group 3 is open to an anchor only, and only if the whole text fits into the budget by itself (`rest` says how many tokens are still to
come). So a waypoint, or a beginning of a text that is too large for the store, uses free bytes and bytes of waypoints, and no more.
A state is used when it is put, when a text goes on from it, and, where two or more texts share it, when one of those is used. An edge is
dropped with the last state that needs it.

Invariants (property tests hold them):
- `nbytes` is the sum over what is in the tree, and never above the budget.
- Every leaf has a state, so nothing is kept that no state needs.
- `put` returns True and the state is there, or it returns False and the tree is as it was.
- An anchor of a text that fits into the budget by itself is always kept.
- No state is dropped that did not have to be: without the last one dropped, the new state would not have fit.

Knows snapshots; knows no rows, no requests and no model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from mlxspec.cache.attention import KV, copied
from mlxspec.cache.model_cache import Snapshot

TARGET = "the target"  # a part; no drafter bears this name, for names have no spaces
_TOKEN_BYTES = 16  # of a token in an edge, about


Point = list[tuple[mx.array, ...]]  # of one part at a node: what is not kept token by token


@dataclass(kw_only=True, eq=False)
class Node:
    """tokens: of the edge that leads here. segments: keys and values of those, by part and layer; a part may lack. sources (n, H): the
    target's final hiddens that these tokens were sampled from, if kept. state: by part, the target's always. hidden (1, H): the target's
    of the last token, with a state only. used: when the state was last used. is_waypoint: the kind of the state, see the module."""

    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    segments: dict[str, list[KV]] = field(default_factory=dict)
    sources: mx.array | None = None
    state: dict[str, Point] | None = None
    hidden: mx.array | None = None
    used: int = 0
    is_waypoint: bool = False

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
        """The longest beginning of `tokens` that has a state. It counts as used, and is an anchor from here on."""
        path, _ = self._walk(tokens)
        while path and path[-1].state is None:
            path.pop()
        if not path:
            return None
        path[-1].is_waypoint = False
        self._touch(path[-1])
        return self._hit(path)

    def peek(self, tokens: Sequence[int]) -> Hit | None:
        """The state behind just these tokens, if there is one. It does not count as used."""
        path, common = self._walk(tokens)
        node = self._at(path, tokens, common)
        return None if node is None or node.state is None else self._hit(path)

    def _hit(self, path: Sequence[Node]) -> Hit:
        """What the nodes of a path hold, of which the last one has a state."""
        node, length = path[-1], sum(len(n.tokens) for n in path)
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
        *,
        rest: int = 0,
        is_waypoint: bool = False,
    ) -> bool:
        """Keep the state behind `tokens`. Returns False, with the tree as it was, where it does not fit by the rules of the module.

        parts: snapshots from `starts` on, not yet evaluated at best; one that lacks the tokens it should begin with is left out. hidden
        (1, H): the target's, of the last token. sources (n, H): what the last n of the tokens were sampled from. rest: tokens that the
        text is known to have behind `tokens`. is_waypoint: the kind of the state. Nothing is computed for what does not fit. Where
        evaluating raises, the state is not there and the tree is valid; states may have been dropped.
        """
        if not tokens or TARGET not in parts:
            return False
        path, common = self._with_branch(tokens)
        starts = self.starts(tokens, list(parts))
        parts = {n: s for n, s in parts.items() if s.start <= min(common, starts[n])}
        if TARGET not in parts:
            return False
        here = self._at(path, tokens, common)
        growth = self._growth(tokens, parts, sources, path, common)
        new_state = hidden.nbytes + sum(
            x.nbytes for s in parts.values() for arrays in s.point for x in arrays
        )
        growth += new_state - (0 if here is None else here.state_bytes)
        was_anchor = here is not None and here.state is not None and not here.is_waypoint
        shared = _shared(path, common)
        may_drop_anchors = not is_waypoint and self._fits_alone(
            tokens, parts, sources, shared, new_state, rest
        )
        candidates = [
            n for n in self._in_order(shared) if n is not here and (n.is_waypoint or may_drop_anchors)
        ]
        dropped = self._plan(self.nbytes + growth - self.budget, candidates, shared)
        if dropped is None:
            return False
        for node in dropped:
            self._drop(node, shared)
        self._cuttable |= {name for name, s in parts.items() if not any(s.point)}
        try:
            node = self._reach(tokens, parts, hidden, sources)
            node.is_waypoint = is_waypoint and not was_anchor
            self._touch(node)
        finally:
            for other in path:  # edges whose states were dropped, and what is left of an edge that was cut
                self._prune(other)
        return True

    def shrink(self, nbytes: int) -> int:
        """Drop states until no more than `nbytes` are held; returns how many bytes were dropped."""
        before = self.nbytes
        for node in self._in_order({}):
            if self.nbytes <= max(0, nbytes):
                break
            self._drop(node)
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
            assert node.state is not None or not node.is_waypoint, "a waypoint without a state"
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
        self,
        tokens: Sequence[int],
        parts: Mapping[str, Snapshot],
        hidden: mx.array,
        sources: mx.array | None,
    ) -> Node:
        """The node behind `tokens` with its state, its edges filled from `parts` and `sources`. All is evaluated before the tree has it."""
        path, common = self._walk(tokens)
        at = sum(len(n.tokens) for n in path)
        if common > at:
            path.append(self._split((path[-1] if path else self._root).children[tokens[at]], common - at))
        if common < len(tokens):
            path.append(Node(tokens=tuple(tokens[common:]), parent=path[-1] if path else self._root))
        node = path[-1]
        new_segments: list[tuple[Node, str, list[KV]]] = []
        new_sources: list[tuple[Node, mx.array]] = []
        end, heard = 0, len(tokens) - (0 if sources is None else len(sources))
        for step in path:
            begin, end = end, end + len(step.tokens)
            if sources is not None and step.sources is None and heard <= begin:
                new_sources.append((step, copied(sources[begin - heard : end - heard])))
            for name, snapshot in parts.items():
                if name not in step.segments and snapshot.start <= begin:
                    new_segments.append((step, name, _cut(snapshot, begin, end)))
        state = {name: s.point for name, s in parts.items()}
        mx.eval(
            [x for *_, segment in new_segments for kv in segment for x in kv], [x for _, x in new_sources]
        )
        mx.eval([x for point in state.values() for arrays in point for x in arrays], hidden)
        if node.parent is not None and common < len(tokens):
            node.parent.children[node.tokens[0]] = node
            self.nbytes += node.edge_bytes
        self.nbytes -= node.state_bytes + sum(step.edge_bytes for step in path)
        for step, name, segment in new_segments:
            step.segments[name] = segment
        for step, array in new_sources:
            step.sources = array
        node.state, node.hidden = state, hidden
        self.nbytes += node.state_bytes + sum(step.edge_bytes for step in path)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge behind its first `at` tokens; returns the new node there."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root has no edge")
        upper = Node(tokens=node.tokens[:at], parent=parent, used=node.used)
        self.nbytes -= node.edge_bytes
        for name, layers in node.segments.items():
            upper.segments[name] = [tuple(copied(x[:, :, :at]) for x in kv) for kv in layers]
            node.segments[name] = [tuple(copied(x[:, :, at:]) for x in kv) for kv in layers]
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
        """Count the state as used, and those that it shares with other texts."""
        line = [node]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        for step in reversed(line):
            if step is node or len(step.children) > 1:
                self._clock += 1
                step.used = self._clock

    def _at(self, path: Sequence[Node], tokens: Sequence[int], common: int) -> Node | None:
        """The node behind just these tokens, if there is one. path, common: of `_with_branch`."""
        is_there = path and common == len(tokens) == sum(len(n.tokens) for n in path)
        return path[-1] if is_there else None

    def _growth(
        self,
        tokens: Sequence[int],
        parts: Mapping[str, Snapshot],
        sources: mx.array | None,
        path: Sequence[Node],
        common: int,
    ) -> int:
        """Bytes that `_reach` will add to edges. path, common: of `_with_branch`."""
        rates = {name: _token_bytes(s) for name, s in parts.items()}
        heard = len(tokens) - (0 if sources is None else len(sources))
        growth = _TOKEN_BYTES * (len(tokens) - common)
        end = 0
        for step in [*path, Node(tokens=tuple(tokens[common:]))]:
            begin, end = end, min(end + len(step.tokens), len(tokens))
            if step in path:
                end = min(end, common)
            for name, snapshot in parts.items():
                if name not in step.segments and snapshot.start <= begin:
                    growth += (end - begin) * rates[name]
            if sources is not None and step.sources is None and heard <= begin:
                growth += (end - begin) * (sources.nbytes // len(sources))
        return growth

    def _fits_alone(
        self,
        tokens: Sequence[int],
        parts: Mapping[str, Snapshot],
        sources: mx.array | None,
        shared: Mapping[Node, int],
        new_state: int,
        rest: int,
    ) -> bool:
        """Whether the whole text, `rest` tokens longer than `tokens`, and one state would fit into an empty store."""
        path, common = list(shared), sum(shared.values())
        held = sum(n.edge_bytes * num // len(n.tokens) for n, num in shared.items())
        grown = held + self._growth(tokens, parts, sources, path, common)
        return grown * (len(tokens) + rest) / len(tokens) + new_state <= self.budget

    def _in_order(self, shared: Mapping[Node, int]) -> list[Node]:
        """All nodes with states, in the order in which they are dropped for a text of which the tree holds the edges `shared`."""
        own = {n for n, num in shared.items() if num == len(n.tokens)}
        held = [n for n in self._nodes() if n.state is not None]
        return sorted(held, key=lambda n: (not n.is_waypoint, n.is_waypoint and n not in own, n.used))

    def _plan(self, excess: int, candidates: Iterable[Node], shared: Mapping[Node, int]) -> list[Node] | None:
        """The first of `candidates` whose states, and the edges that only they need, make up `excess` bytes; None if all do not."""
        chosen: list[Node] = []
        dropped: set[Node] = set()  # their states
        gone: set[Node] = set()  # their edges too
        for node in candidates:
            if excess <= 0:
                break
            chosen.append(node)
            dropped.add(node)
            excess -= node.state_bytes
            step: Node | None = node
            while step is not None and step.parent is not None:
                if (step.state is not None and step not in dropped) or not gone.issuperset(
                    step.children.values()
                ):
                    break
                num_kept = shared.get(step, 0)
                excess -= step.edge_bytes * (len(step.tokens) - num_kept) // len(step.tokens)
                if num_kept:
                    break
                gone.add(step)
                step = step.parent
        return chosen if excess <= 0 else None

    def _drop(self, node: Node, shared: Container[Node] = ()) -> None:
        """Drop a state, and the edges that only it needed but for those of `shared`."""
        self.nbytes -= node.state_bytes
        node.state = node.hidden = None
        node.is_waypoint = False
        self._prune(node, shared)

    def _prune(self, node: Node, shared: Container[Node] = ()) -> None:
        """Drop an edge that nothing needs, and those before it that only it needed, but for those of `shared`."""
        while node.parent is not None and not node.children and node.state is None and node not in shared:
            self.nbytes -= node.edge_bytes
            del node.parent.children[node.tokens[0]]
            node = node.parent


def _shared(path: Sequence[Node], common: int) -> dict[Node, int]:
    """How many tokens of each edge of `path` belong to a text that shares its first `common` tokens with it."""
    found: dict[Node, int] = {}
    for node in path:
        found[node] = min(len(node.tokens), common - sum(found.values()))
    return found


def _token_bytes(snapshot: Snapshot) -> int:
    """Bytes of one token's keys and values."""
    return sum(x.nbytes // max(1, x.shape[2]) for segment in snapshot.segments for kv in segment for x in kv)


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
    return [tuple(copied(x[:, :, low:high]) for x in kv) for kv in segment]
