"""The tiny checkpoints by name, each written, converted and loaded once. Knows where they lie and who loads them; compares nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny
from compare import load_mlx_lm, load_ours
from tiny import Quantization

from mlxspec.models.assemble import Assembled

QUANTIZED = {
    "mlx-8bit-32": Quantization(bits=8, group_size=32),
    "mlx-4bit-32": Quantization(bits=4, group_size=32),
    "mlx-4bit-64": Quantization(bits=4, group_size=64),
    "mlx-mixed": Quantization(bits=4, group_size=32, mixed=True),
    **{f"mlx-{bits}bit": Quantization(bits=bits, group_size=32) for bits in (2, 3, 5, 6)},
    "mlx-mxfp4": Quantization(bits=4, group_size=32, mode="mxfp4"),
    "mlx-mxfp8": Quantization(bits=8, group_size=32, mode="mxfp8"),
    "mlx-nvfp4": Quantization(bits=4, group_size=16, mode="nvfp4"),
    "mlx-nvfp4-scaled": Quantization(bits=4, group_size=16, mode="nvfp4", scaled=True),
}


class Zoo:
    """Dialects: "hub", "text", "text-bfloat16", "text-unfused", "mlx" and the keys of QUANTIZED."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: dict[tuple[str, str, str], Any] = {}

    def folder(self, shape: str, dialect: str) -> Path:
        path, s = self._root / f"{shape}-{dialect}", tiny.SHAPES[shape]
        if path.is_dir():
            return path
        if dialect == "hub":
            return tiny.write_hub(path, s)
        if dialect.startswith("text"):
            dtype = mx.bfloat16 if dialect.endswith("bfloat16") else mx.float32
            return tiny.write_text_only(path, s, dtype=dtype, unfused=dialect.endswith("unfused"))
        return tiny.convert(self.folder(shape, "hub"), path, QUANTIZED[dialect] if dialect != "mlx" else None)

    def ours(self, shape: str, dialect: str = "hub") -> Assembled:
        return self._once("ours", shape, dialect, load_ours)

    def mlx_lm(self, shape: str, dialect: str = "hub") -> Any:
        return self._once("mlx-lm", shape, dialect, load_mlx_lm)

    def _once(self, whose: str, shape: str, dialect: str, load: Callable[[Path], Any]) -> Any:
        key = (whose, shape, dialect)
        if key not in self._loaded:
            self._loaded[key] = load(self.folder(shape, dialect))
        return self._loaded[key]
