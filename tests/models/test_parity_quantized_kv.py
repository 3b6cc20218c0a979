"""Keys and values in 8 and 4 bits against mlx-lm's quantized cache: the same bytes of the same keys and values, and the logits of whole
models whose caches are quantized from the first token on.

We lay out a head's numbers in an order of our own (`rotary_order`), in which pairs that turn against one another are half a head apart. So
in heads of more than 64 numbers other ones share a scale than in mlx-lm's, whose keys are put into our order for the comparison. A key that
another order of sums rounds otherwise may get another code, one step off, so logits are compared to a bound that is a share of what
quantizing changes at all.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from compare import array, load_mlx_lm, load_ours, to_numpy, tokens_of
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import QuantizedLayerCache
from mlxspec.kernels import attention, quantized_kv
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.layers import rotary_order

HEADS, DIM, NUM_STEPS = 2, 64, 12
SHAPES = {
    s.name: s
    for s in (
        tiny.Shape(name="heads of 64", head_dim=64, rotary=0.125, interval=2, seed=11),
        tiny.Shape(name="heads of 128, tied", head_dim=128, rotary=0.0625, num_heads=6, tied=True, seed=12),
    )
}
TOKENS = tokens_of(6, 40 + NUM_STEPS, tiny.VOCAB)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantized-kv")
    return {name: tiny.write_hub(root / str(i), shape) for i, (name, shape) in enumerate(SHAPES.items())}


@cache
def both(folder: Path) -> tuple[Any, Any]:
    return load_ours(folder).model, load_mlx_lm(folder)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_the_same_bytes_of_the_same_keys(dtype: mx.Dtype, bits: int) -> None:
    """A prompt, a verify of which some tokens are rejected, and steps; mlx-lm's cache is trimmed where ours is committed in part."""
    rng = np.random.default_rng(bits)
    theirs = QuantizedKVCache(group_size=64, bits=bits)
    ours = ModelCache([QuantizedLayerCache(HEADS, DIM, dtype, bits, 1)], 1)
    for width, kept in ((300, 300), (5, 2), (1, 1), (4, 4), (1, 1)):
        keys, values = (
            mx.array(rng.standard_normal((width, HEADS, DIM), np.float32)).astype(dtype) for _ in range(2)
        )
        ours.attention(0).append(keys, values, ours.begin(FlatRows((width,))))
        ours.commit([kept])
        theirs.update_and_fetch(keys.swapaxes(0, 1)[None], values.swapaxes(0, 1)[None])
        theirs.trim(width - kept)
        found = ours.attention(0).view(0, ours.lengths[0])
        for view, wanted in zip(found, theirs.keys_and_values(), strict=True):
            assert all(mx.array_equal(a, b).item() for a, b in zip(view.parts, wanted, strict=True))


class Reordered(QuantizedKVCache):
    """mlx-lm's, with the numbers of each key in another order. Which 64 of them share a scale depends on it, where heads are larger."""

    def __init__(self, bits: int, order: list[int]) -> None:
        super().__init__(group_size=64, bits=bits)
        self.order = mx.array(order)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(keys[..., self.order], values)


def quantized(model: Any, bits: int, order: list[int], patch: pytest.MonkeyPatch) -> list[Any]:
    """mlx-lm's caches, quantized from the first token on, and its attention with queries in the same order."""
    attend, turned = base.quantized_scaled_dot_product_attention, mx.array(order)
    patch.setattr(
        base,
        "quantized_scaled_dot_product_attention",
        lambda queries, *rest, **options: attend(queries[..., turned], *rest, **options),
    )
    return [Reordered(bits, order) if isinstance(c, KVCache) else c for c in make_prompt_cache(model)]


def their_logits(model: Any, caches: list[Any]) -> np.ndarray:
    prompt = TOKENS[:-NUM_STEPS]
    found = [model(array(prompt)[None], cache=caches)[0]]
    found += [model(array([t])[None], cache=caches)[0] for t in TOKENS[len(prompt) :]]
    return to_numpy(found)


def our_logits(model: Any, bits: int) -> np.ndarray:
    """A prompt, then steps."""
    made, prompt = model.make_cache(1, kv_bits=bits), TOKENS[:-NUM_STEPS]
    found = [model.forward(array(prompt), FlatRows((len(prompt),)), made, certain=True).logits]
    made.commit()
    for token in TOKENS[len(prompt) :]:
        found.append(model.forward(array([token]), FlatRows((1,)), made).logits)
        made.commit()
    return to_numpy(found)


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed products"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_logits(
    folders: dict[str, Path], name: str, bits: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """packed: by MLX's products with quantized matrices, as on a GPU."""
    for module in (quantized_kv, attention):
        monkeypatch.setattr(module, "has_products", lambda: packed)
    ours, theirs = both(folders[name])
    c = ours._config
    order = rotary_order(c.head_dim, c.rope_dims)
    assert (sorted(order[:64]) == list(range(64))) == (c.head_dim == 64)  # larger heads are grouped otherwise
    got = our_logits(ours, bits)
    wanted = their_logits(theirs, quantized(theirs, bits, order, monkeypatch))
    plain = their_logits(theirs, make_prompt_cache(theirs))
    changed, off = np.abs(wanted - plain).max(), np.abs(got - wanted).max()
    print(
        f"{name}, {bits} bits: off by {off:.1e}, quantizing changes {changed:.1e}, logits up to {np.abs(wanted).max():.1f}"
    )
    # Rounding moves every number by 0.29 of a step (root mean square), another code moves one number by a whole step. One code in a
    # thousand may be another one where sums are in another order.
    assert off < np.sqrt(1e-3) / 0.29 * changed
    assert (got.argmax(-1) == wanted.argmax(-1)).mean() > 0.95
