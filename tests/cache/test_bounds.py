"""Bytes that caches hold: never more than what is planned for a row, and what is kept of a text keeps nothing else alive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.windowed import ALIGNMENT, WindowedLayerCache
from mlxspec.engine.memory import row_bytes
from mlxspec.kernels import conv_ops
from mlxspec.kernels.flat import FlatRows
from tests import tiny_models

CHUNK, VERIFY = 32, 16


def run(model: Any, cache: ModelCache, num: int, *, certain: bool) -> None:
    out = model.forward(mx.zeros((num,), mx.int32), FlatRows((num,)), cache, certain=certain)
    mx.eval(out.logits, [x for layer in cache.layers for x in layer.arrays])


@catches(
    "buffers of keys grow by less than is planned",
    "mlxspec.cache.attention:AttentionLayerCache.bytes_for",
    lambda _: lambda self, length, widest: self._bytes_of(length + length // 8),
    case="attention",
)
@catches(
    "tapes take nothing",
    "mlxspec.cache.recurrent:tape_bytes",
    lambda _: lambda width, state: 0,
    case="recurrent",
)
@pytest.mark.parametrize("stack", ["attention", "recurrent", "hybrid"])
def test_a_row_holds_no_more_than_is_planned_for_it(stack: str) -> None:
    """However it grew: by pieces of a prompt, by verifies of which some stays, and from what was kept."""
    rng, model = np.random.default_rng(0), tiny_models.stack(stack)
    cache, length = model.make_cache(1), 0
    while length < 600:
        is_prompt = rng.random() < 0.6
        num = int(rng.integers(1, CHUNK + 1 if is_prompt else VERIFY + 1))
        run(model, cache, num, certain=is_prompt)
        planned = row_bytes(model.make_cache(0), length + num, CHUNK, VERIFY)
        assert cache.nbytes <= planned, length
        kept = num if is_prompt else int(rng.integers(num + 1))
        cache.commit([kept])
        alone = model.make_cache(0).bytes_for(length + num, prefill=CHUNK, verify=VERIFY)
        length += kept
        assert cache.nbytes <= alone, length  # no forward writes states beside those that it reads
        again = model.make_cache(1)
        again.restore(cache.snapshot(0))
        mx.eval([x for layer in again.layers for x in layer.arrays])
        assert again.nbytes <= row_bytes(model.make_cache(0), length, CHUNK, VERIFY), length
        if rng.random() < 0.2:
            cache = again


@catches(
    "a window begins a token late",
    "mlxspec.cache.windowed:WindowedLayerCache.first_seen",
    lambda _: lambda self, length: max(0, length - self.window + 2) // ALIGNMENT * ALIGNMENT,
)
def test_a_window_is_seen_whole_and_little_before_it() -> None:
    for window in (1, 2, 31, 32, 33, 100):
        layer = WindowedLayerCache(1, 4, window, mx.float32, 1)
        for length in range(300):
            first = max(0, length - window + 1)  # that the next token sees
            assert first - ALIGNMENT < layer.first_seen(length) <= first


def alive(make: Callable[[], mx.array]) -> int:
    """Bytes that stay in memory with what is made."""
    gc.collect()
    before = mx.get_active_memory()
    made = make()
    mx.eval(made)
    gc.collect()
    return mx.get_active_memory() - before - made.nbytes


def whole_prompts(_: Any) -> Any:
    return lambda joined, shape, starts, index: joined[:, joined.shape[1] - shape[1] :]


@catches("a window refers to its prompt", "mlxspec.kernels.conv_ops:window_after", whole_prompts)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_window_of_inputs_keeps_no_prompt(num_rows: int) -> None:
    def make() -> mx.array:
        window, inputs = mx.ones((num_rows, 3, 8)), mx.ones((num_rows << 14, 8))
        joined = conv_ops.joined_inputs(window, inputs, None)
        mx.eval(joined)
        return conv_ops.window_after(joined, window.shape, mx.array([0]), None)

    assert alive(make) < 1 << 16
