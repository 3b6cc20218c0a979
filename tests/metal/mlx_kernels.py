"""MLX's own one-row quantized kernel, run from the header that the installed MLX ships: what ours must equal bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.kernels.quantized_weight import QuantizedWeight

_FOLDER = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
_PLACE = "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
_SHARED = ("get_pack_factor(", "get_bytes_per_pack(", "load_vector(", "qdot(")


class _Text(NamedTuple):
    """Where one kernel's text stands: whole files, then what is taken of another, then the call."""

    whole: tuple[str, ...]
    file: str
    needed: tuple[str, ...]
    body: str


_AFFINE = _Text(
    (),
    "quantized.h",
    (*_SHARED, "qmv_fast_impl("),
    f"qmv_fast_impl<T, GROUP, BITS, true>(w, scales, biases, x, y, sizes[0], sizes[1], {_PLACE});",
)
_MICROSCALING = _Text(
    ("fp4.h", "fp8.h"),
    "fp_quantized.h",
    ("dequantize_scale(", "Dequantize {", *_SHARED, "fp_qmv_fast_impl("),
    f"fp_qmv_fast_impl<T, GROUP, BITS, true>(w, scales, nullptr, x, y, sizes[0], sizes[1], {_PLACE});",
)
# a half from a float without saying so, which the emulator refuses and Metal does not
_SAID = {
    "return converted * 256.0;": "return float16_t(converted * 256.0);",
    "return bits & 8 ? -converted : converted;": "return float16_t(bits & 8 ? -float(converted) : float(converted));",
}


def missing_header(mode: str) -> str | None:
    """Why this cannot run here, or None."""
    text = _text(mode)
    if not all((_FOLDER / name).is_file() for name in (*text.whole, text.file)):
        return "the installed MLX ships no kernel headers"
    found = (_FOLDER / text.file).read_text()
    gone = [name for name in text.needed if not re.search(rf" {re.escape(name)}", found)]
    return f"the installed MLX's {text.file} has no {gone[0]}" if gone else None


def _text(mode: str) -> _Text:
    return _AFFINE if mode == "affine" else _MICROSCALING


def _header(text: _Text) -> str:
    """All that the call needs. Both branches of `if constexpr` are valid code, and Metal's C++ is 14 here."""
    whole = "".join((_FOLDER / name).read_text().replace("#pragma once", "") for name in text.whole)
    for implied, said in _SAID.items():
        whole = whole.replace(implied, said)
    found = (_FOLDER / text.file).read_text().replace("if constexpr", "if")
    functions = "".join(_function(found, name) for name in text.needed)
    return f"constant constexpr const int SIMD_SIZE = 32;\n{whole}{functions}"


def _function(text: str, name: str) -> str:
    """A function or class template, from "template" to its closing brace."""
    at = text.index(f" {name}")
    start, end, depth = text.rindex("\ntemplate", 0, at), text.index("{", at), 1
    while depth:
        end += 1
        depth += {"{": 1, "}": -1}.get(text[end], 0)
    return text[start : end + 1] + (";" if name.endswith("{") else "")


def one_row(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """x (1, K) -> (1, N), as MLX's qmv_fast computes it; through the current factory of launch.py."""
    text = _text(weight.mode)
    kernel = launch.factory()(
        name=f"mlx_qmv_fast_{weight.mode}",
        input_names=["w", "scales", "biases", "x", "sizes"],
        output_names=["y"],
        header=_header(text),
        source=f"\n{text.body}\n",
    )
    (out_features, in_features), groups = weight.shape, -(-weight.shape[0] // 8)
    (y,) = kernel(
        inputs=[
            weight.codes,
            weight.scales,
            weight.scales if weight.biases is None else weight.biases,
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
