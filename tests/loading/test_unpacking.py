"""Quantized matrices that are unpacked at load have the very numbers of MLX's own operation."""

from __future__ import annotations

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlxspec.errors import ModelError
from mlxspec.loading.unpacking import unpack
from mlxspec.loading.weights import Packed, dequantize, split_experts


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.bfloat16, mx.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize(
    "stored", [mx.float32, mx.bfloat16, mx.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (8, 64), (8, 128), (3, 64), (6, 32)])
@pytest.mark.parametrize("shape", [(24, 128), (3, 8, 256)], ids=["matrix", "stack"])
def test_affine_weights_are_unpacked_to_the_bit(
    shape: tuple[int, ...], bits: int, group: int, stored: mx.Dtype, dtype: mx.Dtype
) -> None:
    values = mx.array(np.random.default_rng(bits).standard_normal(shape, np.float32)).astype(stored)
    packed, scales, biases = mx.quantize(values, group_size=group, bits=bits)
    named = {"m.weight": packed, "m.scales": scales, "m.biases": biases, "other": values}
    got = dequantize(named, {"m": Packed(group, bits, "affine")}, dtype)
    assert set(got) == {"m.weight", "other"}
    wanted = mx.dequantize(packed, scales, biases, group_size=group, bits=bits, dtype=dtype)
    assert got["m.weight"].dtype == wanted.dtype
    assert mx.array_equal(got["m.weight"], wanted)


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_other_formats_are_unpacked_by_mlx(mode: str, bits: int, group: int) -> None:
    values = mx.array(np.random.default_rng(0).standard_normal((8, 128), np.float32))
    packed, scales = mx.quantize(values, group_size=group, bits=bits, mode=mode)
    got = dequantize({"m.weight": packed, "m.scales": scales}, {"m": Packed(group, bits, mode)}, mx.float32)
    wanted = mx.dequantize(packed, scales, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    assert mx.array_equal(got["m.weight"], wanted)


def test_an_expert_that_is_missing_is_named() -> None:
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    weights = {name.format(i): mx.zeros((2, 2)) for i in (0, 2)}
    with pytest.raises(ModelError, match="Experts are missing"):
        split_experts(weights)
    assert len(split_experts({name.format(i): mx.zeros((2, 2)) for i in (0, 1)})) == 1


def test_the_second_scale_of_nvfp4_multiplies_or_divides() -> None:
    """ModelOpt's multiplies, that of compressed-tensors divides: the same numbers, told the other way round."""
    packed, scale, _ = *mx.quantize(mx.ones((2, 32)), group_size=16, bits=4, mode="nvfp4"), None
    one = {"a.weight": packed.view(mx.uint8), "a.weight_scale": scale, "a.weight_scale_2": mx.array(4.0)}
    other = {
        "a.weight_packed": one["a.weight"],
        "a.weight_scale": scale,
        "a.weight_global_scale": mx.array(0.25),
    }
    for weights in (one, other):
        assert unpack(weights, {})["a.weight"].format == "NVFP4"
        assert weights.keys() == {"a.weight"}
        assert mx.allclose(weights["a.weight"], mx.full((2, 32), 4.0), rtol=0.1).item()  # scales are rounded
