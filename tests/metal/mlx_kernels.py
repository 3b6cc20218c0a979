"""MLX's own one-row quantized kernel, run from the header that the installed MLX ships: what ours must equal bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.kernels.qmv_rows import QuantizedWeight

HEADER = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels" / "quantized.h"
_NEEDED = ("get_pack_factor(", "get_bytes_per_pack(", "load_vector(", "qdot(", "qmv_fast_impl(")
_BODY = """
qmv_fast_impl<T, GROUP, BITS, true>(
  w, scales, biases, x, y, sizes[0], sizes[1], threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


def missing_header() -> str | None:
    """Why this cannot run here, or None."""
    if not HEADER.is_file():
        return "the installed MLX ships no kernel headers"
    text = HEADER.read_text()
    gone = [name for name in _NEEDED if not re.search(rf" {re.escape(name)}", text)]
    return f"the installed MLX's quantized.h has no {gone[0]})" if gone else None


def _function(text: str, name: str) -> str:
    """A function template, from "template" to its closing brace."""
    at = text.index(f" {name}")
    start, end, depth = text.rindex("\ntemplate", 0, at), text.index("{", at), 1
    while depth:
        end += 1
        depth += {"{": 1, "}": -1}.get(text[end], 0)
    return text[start : end + 1]


def one_row(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """x (1, K) -> (1, N), as MLX's qmv_fast computes it; through the current factory of launch.py."""
    text = HEADER.read_text().replace(
        "if constexpr", "if"
    )  # both branches are valid code, and Metal's C++ is 14 here
    constants = "constant constexpr const int SIMD_SIZE = 32;\n"
    kernel = launch._factory(
        name="mlx_qmv_fast",
        input_names=["w", "scales", "biases", "x", "sizes"],
        output_names=["y"],
        header=constants + "".join(_function(text, name) for name in _NEEDED),
        source=_BODY,
    )
    (out_features, in_features), groups = weight.shape, -(-weight.shape[0] // 8)
    (y,) = kernel(
        inputs=[
            weight.codes,
            weight.scales,
            weight.biases,
            x,
            mx.array([in_features, out_features], mx.int32),
        ],
        template=[("T", x.dtype), ("GROUP", weight.group_size), ("BITS", weight.bits)],
        grid=(32, 2 * groups, 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(1, out_features)],
        output_dtypes=[x.dtype],
    )
    return y
