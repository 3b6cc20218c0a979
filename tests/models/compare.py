"""Running our models and mlx-lm's over the same tokens, and saying how far their logits lie apart.

Knows both call conventions; knows no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import Assembled, assemble
from mlxspec.models.qwen3_5 import Qwen35

AT_MOST = 1e-3  # largest difference of two logits that may be rounding
NEAR_TIE = 1e-4  # the two best logits closer than this: either may come first


def load_ours(folder: Path, dtype: mx.Dtype | None = None) -> Assembled:
    return assemble(json.loads((folder / "config.json").read_text()), lambda: read_folder(folder), dtype)


def load_mlx_lm(folder: Path) -> Any:
    from mlx_lm.utils import load_model

    return load_model(folder)[0]


def tokens_of(seed: int, count: int, vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, count)]


def array(tokens: Sequence[int]) -> mx.array:
    return mx.array(list(tokens), mx.int32)


def stepwise(model: Qwen35, tokens: Sequence[int], num_steps: int) -> np.ndarray:
    """Logits (len(tokens), V) of one row: a prefill, then `num_steps` committed steps of one token."""
    cache = model.make_cache(1)
    prompt = tokens[: len(tokens) - num_steps]
    found = [model.forward(array(prompt), FlatRows((len(prompt),)), cache, certain=True).logits]
    cache.commit()
    for token in tokens[len(prompt) :]:
        found.append(model.forward(array([token]), FlatRows((1,)), cache).logits)
        cache.commit()
    return to_numpy(found)


def stepwise_rows(model: Qwen35, rows: Sequence[Sequence[int]], num_steps: int) -> list[np.ndarray]:
    """The same of ragged rows together, each (its tokens, V): one forward for all prompts, then one for each step of all rows."""
    prompts = [tokens[: len(tokens) - num_steps] for tokens in rows]
    cache, flat = model.make_cache(len(rows)), FlatRows(tuple(map(len, prompts)))
    logits = model.forward(array([t for p in prompts for t in p]), flat, cache, certain=True).logits
    cache.commit()
    found = [[logits[a:b]] for a, b in zip(flat.starts, flat.starts[1:], strict=False)]
    for step in range(num_steps):
        tokens = [row[len(prompt) + step] for row, prompt in zip(rows, prompts, strict=True)]
        logits = model.forward(array(tokens), FlatRows((1,) * len(rows)), cache).logits
        cache.commit()
        for r in range(len(rows)):
            found[r].append(logits[r : r + 1])
    return [to_numpy(f) for f in found]


def stepwise_mlx_lm(model: Any, tokens: Sequence[int], num_steps: int) -> np.ndarray:
    """The same of an mlx-lm model with its own caches."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    prompt = tokens[: len(tokens) - num_steps]
    found = [model(array(prompt)[None], cache=cache)[0]]
    found += [model(array([t])[None], cache=cache)[0] for t in tokens[len(prompt) :]]
    return to_numpy(found)


def to_numpy(found: Sequence[mx.array | None]) -> np.ndarray:
    return np.array(mx.concatenate([x for x in found if x is not None]).astype(mx.float32))


def assert_same_logits(ours: np.ndarray, theirs: np.ndarray, what: str, *, at_most: float = AT_MOST) -> None:
    """Close everywhere, and the same best token wherever it is not a near tie. Prints the largest difference."""
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    worst = float(np.abs(ours - theirs).max())
    print(f"{what}: largest difference {worst:.1e} of logits up to {np.abs(theirs).max():.1f}")
    assert worst <= at_most, f"{what}: logits differ by {worst:.1e}"
    top = np.sort(theirs, axis=-1)
    clear = top[:, -1] - top[:, -2] > NEAR_TIE
    assert clear.mean() > 0.9, f"{what}: too many near ties to compare"
    assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all(), f"{what}: another best token"
