"""A process that keeps and finds texts in a prefix store's folder that others use at the same time; run with -m.

Arguments: folder, limit (bytes), seed, number of texts. At the end it prints one JSON object: how many texts it found that it never
wrote, how many bytes the folder had at most at any step of a write, and whether its thread for files still ran.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from mlxspec.engine.prefix_disk.disk import PrefixDisk
from mlxspec.engine.prefix_disk.folder import DiskFiles, PieceFolder
from mlxspec.engine.prefix_disk.mover import Mover
from mlxspec.engine.prefix_disk.plan import PieceNames
from mlxspec.engine.prefix_store import PrefixStore
from tests.engine.crashing import WatchedFiles
from tests.engine.kept_on_disk import BLOCK, PLENTY, ROOTS, check, found, keep


class LockedFiles(WatchedFiles):
    """Watches what is done with the folder's lock held: without it, other processes may change what is counted."""

    def use(self, path: Path, when: int) -> None:
        DiskFiles.use(self, path, when)


def text(rng: random.Random) -> list[int]:
    return [rng.randint(0, 2) for _ in range(rng.randint(1, 14))]


def main(folder: Path, limit: int, seed: int, num_texts: int) -> None:
    rng, own, num_others = random.Random(seed), set(), 0
    files = LockedFiles(folder, limit)
    mover = Mover(PieceFolder(folder, limit, files))
    made = PrefixDisk(mover, PieceNames(ROOTS, block=BLOCK), model="test", hearing=("mtp",))
    store = PrefixStore(PLENTY)
    for _ in range(num_texts):
        kept = text(rng)
        keep(made, store, kept)
        own.add(tuple(kept))
        for _ in range(4):
            wanted = text(rng)
            length = check(found(made, wanted), wanted)
            num_others += length > 0 and tuple(wanted[:length]) not in own
        time.sleep(0.001)
    runs = mover._thread.is_alive()
    made.close(store, 5.0)
    print(
        json.dumps({"others": num_others, "most": files.most, "runs": runs, "failed": made.stats.num_failed})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
