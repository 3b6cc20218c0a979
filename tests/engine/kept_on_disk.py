"""Texts that are kept and found in a prefix store on disk, and whether what is found is right; programs of tests import it too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mlxspec.engine.prefix_disk.disk import Fetch, PrefixDisk
from mlxspec.engine.prefix_disk.folder import DiskFiles, PieceFolder
from mlxspec.engine.prefix_disk.plan import SOURCES, PieceNames
from mlxspec.engine.prefix_store import TARGET, Hit, PrefixStore
from tests.engine.crashing import InlineMover, WatchedFiles
from tests.engine.test_prefix_store import CUTTABLE, NAMES, hiddens, keys, mark, put

BLOCK = 4
PLENTY = 1 << 24
ROOTS = {name: f"{i:064x}" for i, name in enumerate((TARGET, SOURCES, "mtp", "draft"))}
_opened: list[PieceFolder] = []


def disk(
    folder: Path,
    limit: int = PLENTY,
    files: DiskFiles | None = None,
    *,
    hearing=("mtp",),
    roots=ROOTS,
    **more,
) -> PrefixDisk:
    files = files or WatchedFiles(folder, limit)
    mover = InlineMover(PieceFolder(folder, limit, files))
    _opened.append(mover.folder)
    return PrefixDisk(mover, PieceNames(roots, block=BLOCK), model="test", hearing=hearing, **more)


def keep(made: PrefixDisk, store: PrefixStore, tokens: list[int], names=NAMES, num_sources: int = 0) -> bool:
    """Put a state into memory and bring it to the disk. Returns whether memory took it."""
    lacking = [n for n in ("mtp",) if n not in names]
    if not store.covers(tokens, lacking, num_sources) or not put(store, tokens, names, num_sources):
        return False
    made.offer(tokens)
    made.flush(store, 10.0)
    return True


def found(made: PrefixDisk, tokens: list[int], known: int = 0) -> Hit | None:
    fetch: Fetch | None = made.fetch(tokens, known, PLENTY)
    if fetch is None:
        return None
    while not fetch.is_done and not fetch.has_failed:
        fetch.wait(1.0)
        fetch.take(1)
    return fetch.hit() if fetch.is_done else found(made, tokens, known)


def check(hit: Hit | None, tokens: list[int]) -> int:
    """What is found is a beginning of the text, and says so in all its numbers; returns its length."""
    if hit is None:
        return 0
    text = tokens[: hit.length]
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
    heard = hit.parts["mtp"].length if "mtp" in hit.parts else 0
    if heard < hit.length:  # the drafter can catch up
        sources = hit.sources_from(heard)
        assert sources is not None
        assert np.array_equal(np.asarray(sources), np.asarray(hiddens(text))[heard:])
    return hit.length


@contextmanager
def fresh() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "prefix"
        folder.mkdir(mode=0o700)
        yield folder
    while _opened:  # a process that ends, or crashes, leaves no descriptor open
        _opened.pop().close()
