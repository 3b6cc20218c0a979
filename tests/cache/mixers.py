"""One Gated DeltaNet layer without its matrix products, and a cache of that one layer, for tests of rollback.

Token t enters as row t of a table, and what the layer gives is read before the output projection. So no BLAS decides whether a token's
bits depend on what stands beside it, and equality can be asked for bit by bit in every dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.kernels import exactness
from mlxspec.kernels.cpu import gdn_at_once
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_layers import GatedDeltaNet, RoundLayout
from tests import tiny_models
from tests.rounding import UNITS, of_sum

# a forward's tokens one by one, and on a CPU in float32 all at once, with other last bits
FORMS = ("by steps", "at once")
# Of what up to 90 tokens of 32 entries a key sum up to in float32; what comes out is rounded to 16 bits four times at most.
NEAR = {
    mx.float32: of_sum(90 * 32),
    mx.float16: 4 * UNITS[mx.float16],
    mx.bfloat16: 4 * UNITS[mx.bfloat16],
}


@contextmanager
def computed(form: str) -> Iterator[None]:
    """Recurrences inside run in this form, whatever their width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "is_demanded", form == "by steps")
        patch.setattr(gdn_at_once, "BY_STEPS", 1)
        yield


class Mixer:
    """The layer; out (N, Hv * Dv) in its dtype."""

    def __init__(self, config: Qwen35Config, dtype: mx.Dtype, vocab: int = tiny_models.VOCAB) -> None:
        rng, c = np.random.default_rng(5), config
        self.config, self.dtype = config, dtype
        self.net = GatedDeltaNet(c)
        tiny_models._randomize(self.net, rng, 1.0)
        self.net.fuse()
        self.net.conv_weight = self.net.conv_weight.astype(dtype)
        self.net.taps = mx.split(self.net.conv_weight, c.conv_kernel)
        columns = c.conv_dim + c.value_dim + 2 * c.num_v_heads
        table = mx.array(rng.standard_normal((vocab, columns), np.float32)).astype(dtype)
        self.net.in_proj = lambda tokens: table[tokens]
        self.net.out = lambda y: y

    def make_cache(self, num_rows: int) -> ModelCache:
        c = self.config
        sizes = c.num_v_heads, c.v_head_dim, c.k_head_dim, c.conv_dim, c.conv_kernel
        return ModelCache([RecurrentLayerCache(*sizes, self.dtype, num_rows)], num_rows)

    def forward(self, tokens: mx.array, rows: FlatRows, cache: ModelCache, *, certain: bool) -> mx.array:
        """Leaves the transaction open."""
        cache.begin(rows, certain=certain)
        layout = RoundLayout(rows, certain, RowLayout.of(rows), cache.deferred)
        layer = cache.recurrent(0)
        out, state = self.net(tokens, layer.current, layout)
        layer.append(state)
        return out

    def run(self, pieces: list[list[int]], cache: ModelCache, *, certain: bool = False) -> np.ndarray:
        flat = mx.array(np.asarray([t for piece in pieces for t in piece], np.int32))
        rows = FlatRows(tuple(len(p) for p in pieces))
        return as_numpy(self.forward(flat, rows, cache, certain=certain))

    @functools.lru_cache(maxsize=100_000)  # noqa: B019  (mixers live as long as the process)
    def plainly(self, tokens: tuple[int, ...]) -> tuple[np.ndarray | None, list[mx.array]]:
        """Plain decoding, one token a forward: what the last token gives, and state and window behind it."""
        cache = self.make_cache(1)
        if not tokens:
            return None, [cache.recurrent(0).current.state, cache.recurrent(0).current.window]
        _, (state, window) = self.plainly(tokens[:-1])
        cache.recurrent(0).restore((state, window))
        out = self.run([[tokens[-1]]], cache, certain=True)
        cache.commit()
        current = cache.recurrent(0).current
        mx.eval(current.state, current.window)
        return out[0], [current.state, current.window]


@functools.cache
def tiny(dtype: str) -> Mixer:
    """Grouped heads of 32, a window of 3."""
    return Mixer(tiny_models.config(), getattr(mx, dtype))


@functools.cache
def full_size(num_v_heads: int) -> Mixer:
    """The layer of a published model (27B: 48 value heads), bfloat16. Evaluate nothing of it but what must be."""
    c = replace(
        tiny_models.config(),
        num_k_heads=16,
        num_v_heads=num_v_heads,
        k_head_dim=128,
        v_head_dim=128,
    )
    return Mixer(c, mx.bfloat16, vocab=4)


def as_numpy(x: mx.array) -> np.ndarray:
    return np.asarray(x.astype(mx.float32))


def same_state(cache: ModelCache, known: list[list[int]], mixer: Mixer, near: float = 0.0) -> None:
    """State and window of every row, bit for bit those of plain decoding, or as near. Flushes."""
    cache.flush()
    current = cache.recurrent(0).current
    for r, tokens in enumerate(known):
        state, window = mixer.plainly(tuple(tokens))[1]
        assert is_near(as_numpy(current.state[r]), as_numpy(state[0]), near), f"state of row {r}"
        assert np.array_equal(as_numpy(current.window[r]), as_numpy(window[0])), f"window of row {r}"


def same_outputs(
    out: np.ndarray, known: list[list[int]], pieces: list[list[int]], mixer: Mixer, near: float = 0.0
) -> None:
    """What each token of a forward gave, bit for bit what it gives in plain decoding, or as near."""
    place = 0
    for r, (before, piece) in enumerate(zip(known, pieces, strict=True)):
        for i in range(len(piece)):
            wanted = mixer.plainly((*before, *piece[: i + 1]))[0]
            assert is_near(out[place], wanted, near), f"token {i} of row {r}"
            place += 1


def is_near(got: np.ndarray, wanted: np.ndarray, near: float) -> bool:
    """Within `near` of the largest number; 0: the same bits."""
    if not near:
        return np.array_equal(got, wanted)
    return bool(np.abs(got - wanted).max() <= near * max(1e-3, np.abs(wanted).max()))
