"""One rank of several that run forwards when they are told to, as a process of its own: `traffic_side.py FOLDER`, where MLX's ring is told
by the environment who else there is. Says "ready" before and "done" behind each forward, and waits for a line of input in between."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
from rank_side import load

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.ranks import Ranks

WIDTHS = (1, 4)


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    ranks = Ranks(rank=group.rank(), size=group.size(), group=group)
    model = load(Path(sys.argv[1]), ranks).model
    for width in WIDTHS:
        print("ready", flush=True)
        sys.stdin.readline()
        tokens = mx.zeros(width, mx.int32)
        mx.eval(model.forward(tokens, FlatRows((width,)), model.make_cache(1)).logits)
        print("done", flush=True)


if __name__ == "__main__":
    main()
