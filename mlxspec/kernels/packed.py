"""How long a product with quantized weights takes here, measured on a sample. Knows MLX's formats; knows no model."""

from __future__ import annotations

import math
import time
from typing import Any

import mlx.core as mx

_SAMPLE = 512, 2048  # of a matrix that is timed


def seconds_a_weight(group_size: int, bits: int, mode: str) -> float:
    """Seconds of a product with one token, for each weight."""
    form: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    parts = mx.quantize(mx.ones(_SAMPLE), **form)
    x, names = mx.ones((1, _SAMPLE[1])), ("scales", "biases")
    least = math.inf
    for _ in range(3):
        mx.eval(x, parts)
        started = time.perf_counter()
        mx.eval(mx.quantized_matmul(x, parts[0], **dict(zip(names, parts[1:], strict=False)), **form))
        least = min(least, time.perf_counter() - started)
    return least / math.prod(_SAMPLE)
