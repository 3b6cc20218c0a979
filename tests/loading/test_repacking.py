"""Integers as AWQ, GPTQ and compressed-tensors lay them out become MLX's arrays with the same numbers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.errors import ModelError
from mlxspec.loading.repacking import repack
from tests.loading.integers import AWQ, FORMATS, GPTQ, integers, written

P = "model.layers.0.mlp.up_proj"


def values(weights: dict[str, mx.array], bits: int, group: int) -> np.ndarray:
    parts = [weights.pop(f"{P}.{name}") for name in ("weight", "scales", "biases")]
    assert not weights
    return np.array(mx.dequantize(*parts, group_size=group, bits=bits))


@catches(
    "the numbers of a word of AWQ are taken in order",
    "mlxspec.loading.repacking:_OF_AWQ",
    lambda right: tuple(range(8)),
    case="AWQ-64]",
)
@catches(
    "GPTQ's zeros are taken as they are stored",
    "mlxspec.loading.repacking:_of_gptq",
    lambda right: lambda path, parts, told: right(path, parts, {"checkpoint_format": "gptq_v2"}),
    case="GPTQ-4-64]",
)
@pytest.mark.parametrize("side", [32, 64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_the_published_one(name: str, side: int) -> None:
    kind = FORMATS[name]
    made = integers(64, 256, kind.bits, side, symmetric=kind.symmetric)
    weights = {k: mx.array(v) for k, v in written(P, made, kind).items()}
    repack(weights, kind.told)
    found = values(weights, kind.bits, min(side, 128))
    # MLX adds scale * zero, rounded to the dtype of scales
    meant = made.scales.repeat(side, 1) * (made.numbers - made.zeros.repeat(side, 1))
    np.testing.assert_allclose(found, meant, atol=1e-6)


@pytest.mark.parametrize("name", ["AWQ", "GPTQ-4", "integers-4"])
def test_parts_that_do_not_fit_are_refused(name: str) -> None:
    kind = FORMATS[name]
    made = written(P, integers(64, 128, kind.bits, 32, symmetric=kind.symmetric), kind)
    for part in made:
        if part.endswith("weight_shape"):
            continue
        weights = {k: mx.array(v) for k, v in made.items()}
        weights[part] = weights[part][: weights[part].shape[0] // 2]
        with pytest.raises(ModelError, match=r"fit|order|groups of 16"):
            repack(weights, kind.told)


def test_an_order_of_columns_and_a_group_that_mlx_does_not_have() -> None:
    made = written(P, integers(64, 128, 4, 32), FORMATS["GPTQ-4"])
    made[f"{P}.g_idx"] = np.arange(128, dtype=np.int32) % 4
    with pytest.raises(ModelError, match="desc_act"):
        repack({k: mx.array(v) for k, v in made.items()}, GPTQ)
    small = written(P, integers(64, 128, 4, 16), FORMATS["AWQ"])
    with pytest.raises(ModelError, match="groups of 16"):
        repack({k: mx.array(v) for k, v in small.items()}, AWQ)


def test_mxfp4_of_compressed_tensors() -> None:
    value = mx.random.normal((32, 64))
    packed, scales = mx.quantize(value, group_size=32, bits=4, mode="mxfp4")
    weights: dict[str, Any] = {f"{P}.weight_packed": packed.view(mx.uint8), f"{P}.weight_scale": scales}
    repack(weights, {})
    assert mx.array_equal(weights[f"{P}.weight"], packed)
    assert mx.array_equal(weights[f"{P}.scales"], scales)
