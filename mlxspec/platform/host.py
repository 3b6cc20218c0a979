"""Reads device arrays on the host. All other modules read through here, so that every dtype works in one place.

numpy has no bfloat16: its buffer protocol rejects an MLX array of that dtype. Knows arrays; knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)

import mlx.core as mx  # isort: skip
import numpy as np
from numpy.typing import NDArray


def numbers(x: mx.array) -> NDArray[Any]:
    """Return the elements of `x`, of any shape and dtype; evaluates it. 16-bit floats become float32, without loss; other dtypes are
    kept. Raises what MLX raises where the computation fails."""
    x = x.astype(mx.float32) if x.dtype in (mx.bfloat16, mx.float16) else x
    mx.eval(x)  # numpy swallows the error of a computation that fails, and reads zeros
    return np.asarray(x)


def raw_bytes(x: mx.array) -> NDArray[np.uint8]:
    """Return a copy of the bytes of `x` in the order of its elements, (n,) uint8, of any dtype; evaluates it."""
    return np.array(x.reshape(-1).view(mx.uint8))


def memory(arrays: Sequence[mx.array]) -> list[NDArray[np.uint8]]:
    """Return the memory of evaluated arrays itself, not a copy, as (..., n) uint8, of any dtype: the last axis has the bytes of the
    elements.

    It waits for no other work of the device, and may be called in any thread. A few microseconds an array.
    """
    rows = (mx.reshape(x, (1,), stream=mx.cpu) if x.ndim == 0 else x for x in arrays)
    seen = [mx.view(row, mx.uint8, stream=mx.cpu) for row in rows]
    mx.eval(seen)
    return [np.array(x, copy=False) for x in seen]


def from_bytes(data: NDArray[np.uint8], dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """Return the array whose bytes `raw_bytes` read, in memory of its own."""
    return mx.array(data).view(dtype).reshape(shape)
