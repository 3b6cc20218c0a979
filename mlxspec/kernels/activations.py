"""SiLU, sigmoid and what they gate. On a GPU and for few tokens MLX's own; for many on a CPU a rational form that vectorizes.

MLX's CPU exp costs 11 ns an element whatever surrounds it, which is a third of a small model's prefill. The rational form (tanh as
x P(x^2) / Q(x^2), minimax coefficients as in Eigen's generic tanh) is within 2e-7 of the exact sigmoid. It is used for more tokens
than a verify has, so that plain and drafted decoding see the same function. Knows shapes only.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlxspec import device

_MANY = 256  # tokens; no row's verify is wider than its draft limit of as many
_LIMIT = 7.9  # tanh is 1 within float32 behind it
_P = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_Q = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)


def sigmoid(x: mx.array) -> mx.array:
    """(..., C) with the leading axes counting tokens; x's dtype."""
    return _wide_sigmoid(x) if _is_wide(x) else mx.sigmoid(x)


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x)"""
    return _wide_silu(x) if _is_wide(x) else nn.silu(x)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up"""
    return _wide_swiglu(gate, up) if _is_wide(gate) else _swiglu(gate, up)


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMS norm of y (N, H, D) float32 over its last axis, times weight (D,) and silu(z): z (N, H * D) and the result are of one dtype.

    Two launches on a GPU, as the norm goes without its weight: MLX would first widen that to y's float32, at every call.
    """
    normed = mx.fast.rms_norm(y, None, eps)
    gate = _wide_gate if _is_wide(z) else _gate
    return gate(normed, z.reshape(y.shape), weight).reshape(z.shape)


def _is_wide(x: mx.array) -> bool:
    return (
        x.dtype == mx.float32
        and x.size > _MANY * x.shape[-1]
        and device.backend() == "cpu"
        and device.compile_enabled()  # step by step it would be the slower one
    )


def rational_sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + exp(-x)) within 2e-7, float32. Even and odd powers are paired so that few operations depend on one another."""
    t = mx.clip(x * 0.5, -_LIMIT, _LIMIT)
    u = t * t
    u2 = u * u
    p = ((_P[0] + _P[1] * u) + (_P[2] + _P[3] * u) * u2) + ((_P[4] + _P[5] * u) + _P[6] * u2) * (u2 * u2)
    q = (_Q[0] + _Q[1] * u) + (_Q[2] + _Q[3] * u) * u2
    return 0.5 + 0.5 * (t * p / q)


@partial(mx.compile, shapeless=True)
def _wide_sigmoid(x: mx.array) -> mx.array:
    return rational_sigmoid(x)


@partial(mx.compile, shapeless=True)
def _wide_silu(x: mx.array) -> mx.array:
    return x * rational_sigmoid(x)


@partial(mx.compile, shapeless=True)
def _wide_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * rational_sigmoid(gate) * up


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def _wide_gate(normed: mx.array, z: mx.array, weight: mx.array) -> mx.array:
    return z * rational_sigmoid(z) * (normed * weight)


@partial(mx.compile, shapeless=True)
def _gate(normed: mx.array, z: mx.array, weight: mx.array) -> mx.array:
    return (nn.silu(z.astype(mx.float32)) * (normed * weight)).astype(z.dtype)
