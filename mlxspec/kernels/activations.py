"""SiLU, sigmoid and gated products: MLX's own, or a CPU's form of them (cpu/sigmoid.py)."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlxspec.kernels import cpu
from mlxspec.kernels.cpu import sigmoid


def gated(y: mx.array, gate: mx.array) -> mx.array:
    """Return y * sigmoid(gate)."""
    return sigmoid.times_sigmoid(y, gate) if cpu.takes(y.dtype) else y * mx.sigmoid(gate)


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x)."""
    return sigmoid.times_sigmoid(x, x) if cpu.takes(x.dtype) else nn.silu(x)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up."""
    return (sigmoid.swiglu if cpu.takes(gate.dtype) else _swiglu)(gate, up)


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return the RMS norm of y (N, H, D) float32 over its last axis, times weight (H * D,) and silu(z). z (N, H * D) and the result have
    one dtype.

    Two launches on a GPU, because the norm runs without its weight: MLX would first widen the weight to y's float32 at every call.
    """
    normed = mx.fast.rms_norm(y, None, eps)
    return (sigmoid.gate if cpu.takes(z.dtype) else _gate)(normed.reshape(z.shape), z, weight)


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def _gate(normed: mx.array, z: mx.array, weight: mx.array) -> mx.array:
    return (nn.silu(z.astype(mx.float32)) * (normed * weight)).astype(z.dtype)
