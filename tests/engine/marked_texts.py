"""Snapshots whose numbers say which text they belong to; tests of the prefix cache and programs of tests put them into it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxspec.cache.snapshot import Snapshot
from mlxspec.engine.prefix.tree import TARGET, KeyedText, PrefixTree

NAMES = (TARGET, "mtp", "draft")  # the middle one has keys and values only, as heads do
CUTTABLE = {"mtp"}
KINDS = (NAMES, NAMES[:1], NAMES[:2], NAMES[::2])
PLENTY = 1 << 30


def keys(tokens: list[int], name: str) -> mx.array:
    """(1, 2, n, 3): a number for each token, its place included."""
    values = np.asarray([t + 100 * i + 1000 * len(name) for i, t in enumerate(tokens)], np.float32)
    return mx.array(np.broadcast_to(values[None, None, :, None], (1, 2, len(tokens), 3)).copy())


def mark(tokens: list[int], name: str) -> float:
    """A number that float32 holds, however long the text is."""
    return float((sum((i + 1) * t for i, t in enumerate(tokens)) + 7 * len(name)) % 1_000_003)


def snapshot(tokens: list[int], name: str, start: int) -> Snapshot:
    kept = keys(tokens, name)[:, :, start:]
    point = [] if name in CUTTABLE else [(mx.full((4,), mark(tokens, name)),)]
    return Snapshot(len(tokens), [[(kept, kept + 0.5)]], point, start)


def put(tree: PrefixTree, tokens: list[int], names=NAMES, *, owner: str = "", **more) -> bool:
    text = KeyedText(tokens, owner)
    starts = tree.starts(text, len(tokens), names)
    parts = {name: snapshot(tokens, name, starts[name]) for name in names}
    return tree.put(text, len(tokens), parts, mx.full((1, 2), float(len(tokens))), **more)


def depth(tree: PrefixTree, tokens: list[int], needed=()) -> int:
    return tree.depth(KeyedText(tokens), len(tokens), needed)
