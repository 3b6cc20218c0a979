"""Layers of Gemma that mlx-lm's code computes: what the config says of them is theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.models import gemma_layers
from mlxspec.models.config_values import Values
from mlxspec.models.gemma_config import RotaryShape
from mlxspec.models.gemma_layers import Turn
from mlxspec.platform.host import numbers
from tests import families

DIM, POSITIONS = 32, [0, 1, 7, 100, 4000]
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
}


def plain(shape: RotaryShape, x: np.ndarray) -> np.ndarray:
    """x (positions, heads, 1, D), turned pair by pair."""
    half = DIM // 2
    angles = np.arange(half, dtype=np.float64)
    angles = shape.scaling.apply(shape.theta ** (-2 * angles / DIM), shape.theta)
    angles = np.asarray(POSITIONS)[:, None, None, None] * np.where(
        np.arange(half) < shape.num_pairs, angles, 0.0
    )
    length = np.where(np.arange(half) < shape.num_pairs, shape.scaling.amplitude, 1.0)
    a, b = x[..., :half], x[..., half:]
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.concatenate([part * length for part in turned], axis=-1)


def unstretched(right: Any) -> Any:
    """yarn's cosines and sines are not multiplied."""

    def call(self: Turn, x: mx.array, offset: Any = 0) -> mx.array:
        self._lengths = None
        return right(self, x, offset)

    return call


@catches("the amplitude is left out", "mlxspec.models.gemma_layers:Turn.__call__", unstretched, case="yarn")
@pytest.mark.parametrize("kind", ROPES)
def test_heads_are_turned_as_the_config_says(kind: str) -> None:
    shape = RotaryShape.of(DIM, Values(ROPES[kind]), 1e4, 4096)
    x = np.random.default_rng(0).standard_normal((len(POSITIONS), 3, 1, DIM)).astype(np.float32)
    found = numbers(Turn(shape)(mx.array(x), mx.array(POSITIONS)))
    np.testing.assert_allclose(found, plain(shape, x.astype(np.float64)), atol=2e-3)


def rounded(right: Any) -> Any:
    """Periods are kept in the compute dtype."""

    def fuse_layer(layer: Any, c: Any, shape: Any, dtype: mx.Dtype) -> None:
        right(layer, c, shape, dtype)
        layer.self_attn.rope._periods = layer.self_attn.rope._periods.astype(dtype)

    return fuse_layer


@catches("periods are rounded to 16 bits", "mlxspec.models.gemma_layers:fuse_layer", rounded)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4-dense"])
def test_a_fused_layer_turns_far_heads_exactly(family: str, dtype: mx.Dtype) -> None:
    """Angles are exact at far positions; only what is turned has 16 bits."""
    rotary = RotaryShape.of(DIM, Values({}), 1e6, 4096)
    shape = replace(families.gemma_layer(None), rotary=rotary)
    c = families.gemma_config(shape, generation=families.GEMMA[family].generation)
    layer: Any = gemma_layers.decoder_layer(c, shape)
    gemma_layers.fuse_layer(layer, c, shape, dtype)
    given = np.random.default_rng(0).standard_normal((len(POSITIONS), 3, 1, DIM)).astype(np.float32)
    x = mx.array(given).astype(dtype)
    found = numbers(layer.self_attn.rope(x, mx.array(POSITIONS)).astype(mx.float32))
    right = plain(rotary, numbers(x.astype(mx.float32)).astype(np.float64))
    np.testing.assert_allclose(found, right, atol=4 * mx.finfo(dtype).eps)
