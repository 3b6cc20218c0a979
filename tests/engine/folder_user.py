"""A process that keeps and finds texts in a prefix cache's folder that others use at the same time; run with -m.

Arguments: folder, limit (bytes), seed, number of texts. At the end it prints one JSON object: how many texts it found that it never
wrote, how many bytes the folder had at most when it looked, and how many writes failed.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from mlxspec.engine.prefix.tree import PrefixTree
from tests.engine.kept_on_disk import PLENTY, bytes_in, check, disk, found, keep


def text(rng: random.Random) -> list[int]:
    return [rng.randint(0, 2) for _ in range(rng.randint(1, 14))]


def main(folder: Path, limit: int, seed: int, num_texts: int) -> None:
    rng, own, num_others, most = random.Random(seed), set(), 0, 0
    made, tree = disk(folder, limit), PrefixTree(PLENTY)
    for number in range(num_texts):
        kept = text(rng)
        keep(made, tree, kept)
        print(number, flush=True)
        own.add(tuple(kept))
        for _ in range(4):
            wanted = text(rng)
            length = check(found(made, wanted), wanted)
            num_others += length > 0 and tuple(wanted[:length]) not in own
        try:
            most = max(most, bytes_in(folder))
        except FileNotFoundError:
            continue
    made.close(tree, 5.0)
    print(json.dumps({"others": num_others, "most": most, "failed": made.files.num_failed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
