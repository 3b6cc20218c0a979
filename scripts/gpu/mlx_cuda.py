"""The Metal kernels on MLX's CUDA backend: what stands in for `mx.fast.metal_kernel` there. MLX compiles the text with NVRTC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .build import ATTRIBUTES, HERE, for_cuda


def metal_kernel(
    *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
) -> Any:
    """As `mx.fast.metal_kernel`, of text in Metal's language."""
    shim = (HERE / "metal_on_cuda.h").read_text().replace("#pragma once", "")
    kernel = mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=ATTRIBUTES + for_cuda(source),
        header=f"{shim}\nnamespace mlx::core::cu {{\nMETAL_NAMES\n{for_cuda(header)}\n}}\n",
    )

    def launch(*, grid: Sequence[int], threadgroup: Sequence[int], **given: Any) -> list[mx.array]:
        """Metal trims a grid that does not divide; CUDA would run the threads beyond it."""
        sizes = (
            max(n for n in range(1, t + 1) if g % n == 0) for g, t in zip(grid, threadgroup, strict=True)
        )
        return kernel(grid=tuple(grid), threadgroup=tuple(sizes), **given)  # type: ignore[no-any-return]

    return launch
