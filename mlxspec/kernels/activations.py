"""SiLU, sigmoid and gated products: MLX's own on a GPU, and for float32 on a CPU a rational form that vectorizes.

MLX's CPU exp costs 11 ns an element whatever surrounds it, which is a third of a small model's prefill and a sixth of a verify. The
rational form (tanh as x P(x^2) / Q(x^2), minimax coefficients as in Eigen's generic tanh) is within 2e-7 of the exact sigmoid. A process
uses one form for every number of tokens, so plain and drafted decoding use the same function.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlxspec.platform import device

_LIMIT = 15.8  # the sigmoid is 0 or 1 within float32 behind it
# sigmoid(x) = 1/2 + tanh(x / 2) / 2, halves and powers of x / 2 within the coefficients
_P = tuple(
    c / 4 ** (i + 1)
    for i, c in enumerate(
        (
            0.00489352455891786,
            0.000637261928875436,
            1.48572235717979e-05,
            5.12229709037114e-08,
            -8.60467152213735e-11,
            2.00018790482477e-13,
            -2.76076847742355e-16,
        )
    )
)
_Q = tuple(
    c / 4**i
    for i, c in enumerate(
        (0.00489352518554385, 0.002268434632439, 0.000118534705686654, 1.19825839466702e-06)
    )
)


def gated(y: mx.array, gate: mx.array) -> mx.array:
    """y sigmoid(gate)"""
    return _rational_gated(y, gate) if _is_rational(y) else y * mx.sigmoid(gate)


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x)"""
    return _rational_silu(x) if _is_rational(x) else nn.silu(x)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up"""
    return _rational_swiglu(gate, up) if _is_rational(gate) else _swiglu(gate, up)


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMS norm of y (N, H, D) float32 over its last axis, times weight (H * D,) and silu(z): z (N, H * D) and the result are of one dtype.

    Two launches on a GPU, as the norm goes without its weight: MLX would first widen that to y's float32, at every call.
    """
    normed = mx.fast.rms_norm(y, None, eps)
    gate = _rational_gate if _is_rational(z) else _gate
    return gate(normed.reshape(z.shape), z, weight)


def _is_rational(x: mx.array) -> bool:
    return (
        x.dtype == mx.float32
        and device.backend() == "cpu"
        and device.compile_enabled()  # step by step it would be the slower one
    )


def times_sigmoid(y: mx.array, x: mx.array) -> mx.array:
    """y / (1 + exp(-x)) within 2e-7 |y|, float32. Written so that no operation stands more than eleven deep: what is deeper MLX cuts into
    several kernels."""
    t = mx.clip(x, -_LIMIT, _LIMIT)
    u = t * t
    u2 = u * u
    p = ((_P[0] + _P[1] * u) + (_P[2] + _P[3] * u) * u2) + ((_P[4] + _P[5] * u) + _P[6] * u2) * (u2 * u2)
    q = (_Q[0] + _Q[1] * u) + (_Q[2] + _Q[3] * u) * u2
    return y * t * p / q + y * 0.5


@partial(mx.compile, shapeless=True)
def _rational_gated(y: mx.array, gate: mx.array) -> mx.array:
    return times_sigmoid(y, gate)


@partial(mx.compile, shapeless=True)
def _rational_silu(x: mx.array) -> mx.array:
    return times_sigmoid(x, x)


@partial(mx.compile, shapeless=True)
def _rational_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return times_sigmoid(gate * up, gate)


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def _rational_gate(normed: mx.array, z: mx.array, weight: mx.array) -> mx.array:
    return times_sigmoid(z * (normed * weight), z)


@partial(mx.compile, shapeless=True)
def _gate(normed: mx.array, z: mx.array, weight: mx.array) -> mx.array:
    return (nn.silu(z.astype(mx.float32)) * (normed * weight)).astype(z.dtype)
