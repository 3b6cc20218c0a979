"""Metal kernels on an NVIDIA GPU: their text as CUDA, handed to MLX, which compiles it with NVRTC.

`metal/metal_on_cuda.h` has the part of Metal's language that the kernels use: a simdgroup is a warp, a threadgroup a block. The text of a
kernel stays as it is but for what `for_cuda` lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxspec.platform.resources import metal_folder

# Names that a Metal kernel finds without declaring them. Metal counts threads of a grid, CUDA blocks.
ATTRIBUTES = """  const metal::uint3 thread_position_in_threadgroup{threadIdx.x, threadIdx.y, threadIdx.z};
  const metal::uint3 threadgroup_position_in_grid{blockIdx.x, blockIdx.y, blockIdx.z};
  const metal::uint3 threads_per_grid{gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z};
  const metal::uint3 thread_position_in_grid{
      blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z};
  const uint thread_index_in_threadgroup = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const uint thread_index_in_simdgroup = thread_index_in_threadgroup % 32;
  const uint simdgroup_index_in_threadgroup = thread_index_in_threadgroup / 32;
"""


def for_cuda(text: str) -> str:
    """Return Metal text in CUDA's words. Changed are address spaces, of which CUDA names only that of a block's arrays; clang's pragma
    for unrolled loops; qualifiers of device functions; and sums of two products, of which clang fuses the first one and nvcc either."""
    text = re.sub(r"//.*|#include <metal_.*", "", text).replace("clang loop unroll(full)", "unroll")
    text = re.sub(r"\b(\w+) \* (\w+) \+ (\w+\[\w+\] \* \w+)(?= :)", r"fma(\1, \2, \3)", text)
    text = re.sub(r"^threadgroup (?=\w+ \w+\[)", "__shared__ ", text, flags=re.MULTILINE)
    text = re.sub(r"\b(device|threadgroup|thread|constant) ", "", text)
    return re.sub(r"^inline ", "__device__ __forceinline__ ", text, flags=re.MULTILINE)


def _header(helpers: str) -> str:
    """Return the text that precedes a kernel: the shim, and the kernel's helper functions in MLX's namespace."""
    shim = (metal_folder() / "metal_on_cuda.h").read_text(encoding="utf-8").replace("#pragma once", "")
    return f"{shim}\nnamespace mlx::core::cu {{\nMETAL_NAMES\n{for_cuda(helpers)}\n}}\n"


def metal_kernel(
    *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
) -> Any:
    """Return the kernel of this Metal text as a CUDA kernel, with the arguments of `mx.fast.metal_kernel`."""
    kernel = mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=ATTRIBUTES + for_cuda(source),
        header=_header(header),
    )

    def launch(*, grid: Sequence[int], threadgroup: Sequence[int], **given: Any) -> list[mx.array]:
        """Launch the kernel and return its outputs. The grid must be a multiple of the threadgroup: Metal trims one that is not, CUDA
        would run the threads beyond it."""
        sizes = (
            max(n for n in range(1, t + 1) if g % n == 0) for g, t in zip(grid, threadgroup, strict=True)
        )
        return kernel(grid=tuple(grid), threadgroup=tuple(sizes), **given)  # type: ignore[no-any-return]

    return launch
