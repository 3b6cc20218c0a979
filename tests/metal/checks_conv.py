"""Data for conv_qkv and the comparison that must hold; used by its tests and by the planted faults."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import reference
from checks_gdn import assert_close, ints, layout, numpy_of

from mlxspec.kernels import conv_qkv as kernel
from mlxspec.kernels.conv_ops import GdnInputs, GdnShape
from mlxspec.kernels.conv_qkv import ConvWeights, LastInputs

SHAPE = GdnShape(num_k_heads=2, num_v_heads=4, k_dim=64, v_dim=32)
ROUNDING = {
    mx.float32: 2e-6,
    mx.float16: 6e-4,
    mx.bfloat16: 5e-3,
}  # outputs are rounded to the compute dtype once


def num_columns(shape: GdnShape) -> int:
    return shape.conv_size + shape.num_v_heads * (shape.v_dim + 2)


def draw(rng: np.random.Generator, *size: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(size).astype(np.float32)).astype(dtype)


def draw_weights(rng: np.random.Generator, shape: GdnShape, dtype: mx.Dtype) -> ConvWeights:
    heads = shape.num_v_heads
    return ConvWeights(
        draw(rng, 4, shape.conv_size, dtype=dtype), -mx.exp(draw(rng, heads)), 4 * draw(rng, heads)
    )


def check_two_forwards(
    first: Sequence[int],
    kept: Sequence[int],
    second: Sequence[int],
    *,
    shape: GdnShape = SHAPE,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    whole: bool = True,
    extra: int = 0,
) -> GdnInputs:
    """Keep `kept` of each row of a forward of `first` widths, run `second` with and without certain, all against float64. `whole`: the last
    forward's inputs are its whole projection, not its first C columns alone. `extra`: tokens that there is room for beside these."""
    rng = np.random.default_rng(seed)
    size, columns, heads = shape.conv_size, num_columns(shape), tuple(shape)
    weights = draw_weights(rng, shape, dtype)
    arrays = [numpy_of(x) for x in (weights.weight, weights.neg_a, weights.dt_bias)]
    window = draw(rng, len(first), 3, size, dtype=dtype)
    old, new = (draw(rng, sum(widths), columns, dtype=dtype) for widths in (first, second))
    last = LastInputs(old if whole else old[:, :size], layout(*first), ints(kept))
    begins, wanted, before, after = [np.cumsum([0, *w]) for w in (first, second)], [], [], []
    for row, n in enumerate(kept):
        begin = begins[0][row]
        history = np.concatenate([numpy_of(window)[row], numpy_of(old)[begin : begin + n, :size]])[-3:]
        tokens = numpy_of(new)[begins[1][row] : begins[1][row + 1]]
        wanted.append(reference.conv_inputs(history, tokens, *arrays, heads))
        before.append(history)
        after.append(np.concatenate([history, tokens[:, :size]])[-3:])
    room = sum(second) + extra
    result, window_before, again = kernel.conv_qkv_metal(
        new, window, weights, shape, layout(*second), last, room=room
    )
    assert {len(x) for x in (result.k, result.log_g, again)} == {room}
    assert np.array_equal(numpy_of(again)[: sum(second)], numpy_of(new)[:, :size]), "inputs for the next"
    result = cut(result, sum(second))
    for name, got, parts in zip(GdnInputs._fields, result, zip(*wanted, strict=True), strict=True):
        assert_close(got, np.concatenate(parts), name, ROUNDING[dtype] if name in "qkv" else 2e-6)
    assert np.array_equal(numpy_of(window_before), np.stack(before)), "the window before these tokens"
    certain, window_after, nothing = kernel.conv_qkv_metal(
        new, window, weights, shape, layout(*second), last, certain=True
    )
    assert np.array_equal(numpy_of(window_after), np.stack(after)), "the window after these tokens"
    assert nothing is None
    assert all(np.array_equal(numpy_of(a), numpy_of(b)) for a, b in zip(certain, result, strict=True))
    return result


def cut(inputs: GdnInputs, num_tokens: int) -> GdnInputs:
    """Of arrays with room for more tokens."""
    return GdnInputs(*(x[:num_tokens] for x in inputs))


def check_fresh(widths: Sequence[int], seed: int = 1) -> None:
    """Nothing deferred: the window stands right before the tokens, as if all of an empty forward had been kept."""
    rng = np.random.default_rng(seed)
    weights = draw_weights(rng, SHAPE, mx.float32)
    window, new = draw(rng, len(widths), 3, SHAPE.conv_size), draw(rng, sum(widths), num_columns(SHAPE))
    got, after, _ = kernel.conv_qkv_metal(new, window, weights, SHAPE, layout(*widths))
    wanted, before, _ = kernel.conv_qkv_twin(new, window, weights, SHAPE, layout(*widths))
    assert np.array_equal(numpy_of(after), numpy_of(before)), "the window"
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, numpy_of(b), "without a last forward", 5e-6)


def check_extreme_gates() -> None:
    """softplus and sigmoid far out, where the naive forms overflow or lose everything; inputs that overflow exp."""
    rng = np.random.default_rng(3)
    weights, projected = draw_weights(rng, SHAPE, mx.float32), np.array(draw(rng, 8, num_columns(SHAPE)))
    extremes = np.float32([-200, -90, -30, -1, 1, 30, 90, 200])
    projected[:, -8:] = extremes[:, None]
    projected[0, :64] = -100.0
    window = draw(rng, 1, 3, SHAPE.conv_size)
    inputs, *_ = kernel.conv_qkv_metal(mx.array(projected), window, weights, SHAPE, layout(8))
    assert all(mx.isfinite(x).all().item() for x in inputs)
    softplus = np.logaddexp(extremes.astype(np.float64)[:, None] + np.array(weights.dt_bias), 0)
    np.testing.assert_allclose(
        np.array(inputs.log_g), np.array(weights.neg_a) * softplus, rtol=3e-6, atol=1e-37
    )
