"""Forms of operations for MLX on a CPU. Each is in place of a plain twin and is tested against it; `takes` is the one rule for all."""

from __future__ import annotations

import mlx.core as mx

from mlxspec.platform import device


def takes(dtype: mx.Dtype) -> bool:
    """Return whether the functions of this package replace MLX's own for this dtype: for float32 on a CPU, where fused operations are
    compiled."""
    return dtype == mx.float32 and device.backend() == "cpu" and device.compile_enabled()
