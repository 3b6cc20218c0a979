"""Texts that are kept and found in a prefix cache on disk, and whether what is found is right; programs of tests import it too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlxspec.engine.prefix.disk import PrefixDisk, open_files
from mlxspec.engine.prefix.tree import TARGET, Hit, KeyedText, PrefixTree
from mlxspec.engine.thread import JobThread
from tests.engine.marked_texts import CUTTABLE, NAMES, keys, mark, put

PLENTY = 1 << 24
ROOTS = {name: f"{i:064x}" for i, name in enumerate((TARGET, "mtp", "draft"))}


def disk(folder: Path, limit: int = PLENTY, *, roots=ROOTS, **more) -> PrefixDisk:
    return PrefixDisk(open_files(folder, limit), JobThread("files"), roots, model="test", **more)


def settle(made: PrefixDisk) -> None:
    """Wait until the file thread has nothing to do."""
    made.flush(PrefixTree(0), 60.0)


def keep(
    made: PrefixDisk,
    tree: PrefixTree,
    tokens: list[int],
    names=NAMES,
    *,
    owner: str = "",
    **more,
) -> bool:
    """Put a state into memory and bring it to the disk. Returns whether memory took it."""
    if not put(tree, tokens, names, owner=owner):
        return False
    made.offer(KeyedText(tokens, owner), len(tokens), **more)
    made.flush(tree, 60.0)
    return True


def found(made: PrefixDisk, tokens: Sequence[int], known: int = 0, owner: str = "") -> Hit | None:
    settle(made)  # it has looked what others have written
    fetch = made.fetch(KeyedText(tokens, owner), known, PLENTY, len(tokens))
    if fetch is None:
        return None
    while not fetch.is_done and not fetch.has_failed:
        fetch.wait(1.0)
        fetch.take(1)
    return fetch.hit() if fetch.is_done else found(made, tokens, known, owner)


def check(hit: Hit | None, tokens: Sequence[int]) -> int:
    """What is found is a beginning of the text, and says so in all its numbers; returns its length."""
    if hit is None:
        return 0
    text = list(tokens[: hit.length])
    assert hit.hidden[0, 0].item() == hit.length
    assert hit.parts[TARGET].length == hit.length
    for name, part in hit.parts.items():
        assert 0 < part.length <= hit.length
        wanted = np.asarray(keys(text[: part.length], name))
        for side, extra in ((0, 0.0), (1, 0.5)):
            got = np.concatenate([np.asarray(segment[0][side]) for segment in part.segments], axis=2)
            assert np.array_equal(got, wanted + extra)
        if name not in CUTTABLE:
            assert part.point[0][0][0].item() == mark(text[: part.length], name)
    return hit.length


def bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir())
