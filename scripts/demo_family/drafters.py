"""Drafters that read the target: the MTP head, the EAGLE-3 and the DFlash2 drafter. What they begin as, and their training on the frozen
target, which is `mlxspec adapt`'s (mlxspec/training/).

Sizes are those of the shipped config.json files. The shipped drafters of layers began close to the MTP head (docs/demo.md); from random
weights they need more steps.
"""

from __future__ import annotations

import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

from mlxspec.platform import device  # noqa: F401  (loads the BLAS before mlx is imported)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec import demo
from mlxspec.loading.qwen_weights import head_of
from mlxspec.loading.row_lists import by_frequency
from mlxspec.models.assemble import assemble_folder
from mlxspec.models.dflash import DFlash
from mlxspec.models.dflash_config import DFlashConfig
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from mlxspec.models.folder import ModelFolder
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.training.adapt_head import Teacher
from mlxspec.training.block_network import BlockNetwork
from mlxspec.training.network import ChainNetwork, Head, Network, float_weights
from mlxspec.training.new_drafter import begin as begin_eagle3
from mlxspec.training.new_drafter import begin_small
from mlxspec.training.states import Batch

from .dataset import Data
from .train import SAVE_SECONDS, Plan, Rows

PLANS = {
    "mtp": Plan(steps=1400, rate=1.5e-3, weight_decay=0.0),
    "eagle3": Plan(steps=3000, rate=1e-3, weight_decay=0.0),
    "dflash": Plan(steps=3000, rate=2e-3, weight_decay=0.0),
}


def tune(name: str, work: Path, out: Path, plan: Plan) -> None:
    """Teach a drafter the distributions of the target in `out`. Its checkpoint in `work` is what it goes on from, and what an MTP head is
    taken from; the others get a folder in `out`."""
    data = Data(work)
    network, head = begin(name, out / "target", data)
    teacher, rows, path = Teacher(network, head), Rows(data, plan), work / f"{name}.safetensors"
    first = _resume(path, teacher) if path.exists() else 0
    began = last = time.time()
    for step in range(first, plan.steps):
        batch = Batch.of(network.target, network.layers, rows.batch(step)[:, : plan.length].tolist())
        loss = teacher.step(batch, plan.rate * plan.factor(step), random.Random(f"{plan.seed} {step}"))
        is_last = step + 1 == plan.steps
        if is_last or (step + 1) % 50 == 0:
            seconds = (time.time() - began) / (step + 1 - first)
            print(
                f"{name} step {step + 1} of {plan.steps}: loss {loss:.3f}, {seconds:.2f} s a step", flush=True
            )
        if is_last or time.time() - last > SAVE_SECONDS:
            last = time.time()
            _save(path, teacher, step + 1)
    if name != "mtp":
        write_drafter(out / name, teacher.head | network.fixed, demo.ROOT / name / "config.json")


def begin(name: str, folder: Path, data: Data) -> tuple[Network, Head]:
    """The form for gradients of a drafter for the target in `folder`, and the weights that it begins with."""
    made = assemble_folder(ModelFolder(folder), mx.float32)
    if name == "mtp":
        head = made.mtp
        new: Any = partial(Qwen35Mtp, made.config, made.model)
        bare = new()
        bare.load_weights(list(head_of(ModelFolder(folder).read(), made.qk_norms).items()))
        weights, fixed = float_weights(bare)
        return ChainNetwork(made.model, new, fixed, head), weights
    config = json.loads((demo.ROOT / name / "config.json").read_text())
    if name == "eagle3":
        new = partial(Eagle3Head, Eagle3Config.from_dict(config), made.model, {"d2t"})
        like = new()
        begin_eagle3(like, frequent(data, len(like.d2t), made.model.vocab_size))
    else:
        names = {"candidate_selector.hidden_projection.weight"}
        new = partial(DFlash, DFlashConfig.from_dict(config, names), made.model)
        like = new()
        begin_small(like)
    weights, fixed = float_weights(like)
    like.fuse()
    return (ChainNetwork if name == "eagle3" else BlockNetwork)(made.model, new, fixed, like), weights


def frequent(data: Data, num: int, vocab: int) -> np.ndarray:
    """(num,): the most frequent ids of the training data, those that end texts and turns among them."""
    counts = np.zeros(vocab, np.int64)
    for kind in data.train.values():
        counts += np.bincount(kind.ids, minlength=vocab)[:vocab]
    counts += np.bincount(data.library, minlength=vocab)[:vocab]
    counts[:3] = counts.max() + 1
    return by_frequency(counts, vocab, num)


def _save(path: Path, teacher: Teacher, step: int) -> None:
    named = {f"head.{name}": value for name, value in teacher.head.items()}
    named |= {f"optimizer.{name}": value for name, value in tree_flatten(teacher.optimizer.state)}
    new = path.with_name(f"{path.stem}.new.safetensors")
    mx.save_safetensors(str(new), named, metadata={"step": str(step)})
    new.replace(path)


def _resume(path: Path, teacher: Teacher) -> int:
    """The step to go on with."""
    found, metadata = mx.load(str(path), return_metadata=True)
    teacher.head = {n.removeprefix("head."): v for n, v in found.items() if n.startswith("head.")}
    state = [(n.removeprefix("optimizer."), v) for n, v in found.items() if n.startswith("optimizer.")]
    teacher.optimizer.state = tree_unflatten(state)
    return int(metadata["step"])


def write_drafter(out: Path, weights: Head, config: Path) -> None:
    """Matrices in bfloat16, norms in float32, integers as they are, under the names that others publish such drafters with."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {
        name.replace("_codebook.weight", "_codebook"): value.astype(mx.bfloat16)
        if value.ndim > 1 and mx.issubdtype(value.dtype, mx.floating)
        else value
        for name, value in weights.items()
    }
    mx.save_safetensors(str(out / "model.safetensors"), stored, metadata={"format": "mlx"})
    (out / "config.json").write_bytes(config.read_bytes())
