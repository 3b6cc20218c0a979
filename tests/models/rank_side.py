"""One rank of several that run tiny checkpoints together, as a process of its own: `rank_side.py LIST OUT`, where MLX's ring is told by the
environment who else there is. LIST: a JSON list of folders. Writes OUT/<folder's name>-<rank>.npz with what `figures` finds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.assemble import Assembled, assemble_folder
from mlxspec.models.fill import evaluate
from mlxspec.models.folder import ModelFolder
from mlxspec.models.sizes import bytes_of

ROWS = (21, 9)  # tokens of two prompts
WIDTHS = (3, 2)  # of a verify behind them, of whose tokens KEPT stand
KEPT = (1, 2)


def load(folder: Path, group: mx.distributed.Group | None = None) -> Assembled:
    made = assemble_folder(ModelFolder(folder), mx.float32, group=group)
    evaluate([m for m in (made.model, made.mtp) if m is not None])
    return made


def figures(made: Assembled) -> dict[str, np.ndarray]:
    """Logits of a ragged prompt, of a ragged verify, of a plain step behind what stood of it, and the MTP head's of a first draft."""
    model = made.model
    rng = np.random.default_rng(3)

    def draw(num: int) -> mx.array:
        return mx.array(rng.integers(0, model.vocab_size, num).astype(np.int32))

    cache = model.make_cache(len(ROWS))
    prompt = draw(sum(ROWS))
    first = model.forward(prompt, FlatRows(ROWS), cache, certain=True)
    found = {"prompt": first.logits}
    if made.mtp is not None:
        own = made.mtp.make_cache(len(ROWS))
        found["draft"] = made.mtp.forward(prompt, first.hidden, FlatRows(ROWS), own).logits
        own.commit()
    cache.commit()
    found["verify"] = model.forward(draw(sum(WIDTHS)), FlatRows(WIDTHS), cache).logits
    cache.commit(KEPT)
    step = model.forward(draw(len(ROWS)), FlatRows((1,) * len(ROWS)), cache)
    found |= {"step": step.logits, "hidden": step.hidden}
    cache.commit()
    mx.eval(*found.values())
    return {name: np.asarray(value) for name, value in found.items()} | {"bytes": np.asarray(bytes_of(model))}


def main() -> None:
    listed, out = Path(sys.argv[1]), Path(sys.argv[2])
    group = mx.distributed.init(strict=True, backend="ring")
    for folder in map(Path, json.loads(listed.read_text())):
        np.savez(out / f"{folder.name}-{group.rank()}.npz", **figures(load(folder, group)))


if __name__ == "__main__":
    main()
