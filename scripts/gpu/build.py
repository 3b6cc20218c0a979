"""From metal/NAME.metal and a launch to a CUDA kernel: the text as it is, and around it the shim, a signature and template values.

As MLX does for Metal, a kernel is made for each set of template values. Knows nvcc; needs no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .cases import Launch

HERE = Path(__file__).resolve().parent
METAL = HERE.parents[1] / "metal"
_BODY = "//// body\n"
_CTYPES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "__half",
    np.dtype(np.uint16): "__nv_bfloat16",
    np.dtype(np.int32): "int",
    np.dtype(np.uint32): "uint",
    np.dtype(np.uint8): "unsigned char",
}
_TEMPLATE = {"float": "float", "half": "__half", "bfloat": "__nv_bfloat16"}
ATTRIBUTES = """  const metal::uint3 thread_position_in_threadgroup{threadIdx.x, threadIdx.y, threadIdx.z};
  const metal::uint3 threadgroup_position_in_grid{blockIdx.x, blockIdx.y, blockIdx.z};
  const metal::uint3 threads_per_grid{gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z};
  const metal::uint3 thread_position_in_grid{
      blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z};
  const uint thread_index_in_threadgroup = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const uint thread_index_in_simdgroup = thread_index_in_threadgroup % 32;
  const uint simdgroup_index_in_threadgroup = thread_index_in_threadgroup / 32;
"""


class BuildError(Exception):
    """nvcc is missing or refused the text; the message is one a person can act on."""


def missing_compiler() -> str | None:
    """Why nothing can be built here, or None."""
    return None if shutil.which("nvcc") else "there is no nvcc"


def compiler_release() -> str:
    """Such as "release 13.0"."""
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    return next((part.strip() for part in said.split(",") if "release" in part), "unknown")


def key_of(launch: Launch) -> tuple[Any, ...]:
    """What one compiled kernel serves: launches that differ in data and sizes only. The threads of a block are its launch bound."""
    dtypes = tuple(a.dtype.str for a in launch.inputs.values())
    return launch.kernel, tuple(launch.template.items()), dtypes, int(np.prod(launch.threadgroup))


def sized_inputs(launch: Launch) -> list[str]:
    """Inputs whose sizes the kernel reads, as `NAME_shape`, in the order of its parameters."""
    body = _text(launch.kernel)[1]
    return [name for name in launch.inputs if re.search(rf"\b{name}_shape\b", body)]


def unit(launches: Iterable[Launch]) -> tuple[str, dict[tuple[Any, ...], int]]:
    """The CUDA source with a kernel for each distinct launch, and which place in its table a key has."""
    places: dict[tuple[Any, ...], int] = {}
    first: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        key = key_of(launch)
        _check_grid(launch)
        places.setdefault(key, len(places))
        first.setdefault(key, launch)
    parts = ['#include "metal_on_cuda.h"\n', "METAL_BEGINS\n"]
    for kernel in dict.fromkeys(launch.kernel for launch in first.values()):
        helpers, body = _text(kernel)
        parts.append(f"namespace {kernel} {{\n{helpers}")
        for key, launch in first.items():
            if launch.kernel == kernel:
                parts.append(_function(launch, f"kernel_{places[key]}", key[-1], body))
        parts.append(f"#undef UNROLL\n}}  // namespace {kernel}\n")
    names = [f"(const void*)metal_text::{key[0]}::kernel_{place}" for key, place in places.items()]
    parts += ["METAL_ENDS\n", f"static const void* const kernels[] = {{{', '.join(names)}}};\n"]
    return "".join(parts) + (HERE / "host.cu").read_text(), places


def compile_unit(source: str, folder: Path, *, arch: str, output: str = "kernels.so") -> tuple[Path, str]:
    """Compile into `folder`; returns the file and what ptxas says of registers and spills. `output`: a .so to load, a .ptx or a .cubin."""
    if missing_compiler():
        raise BuildError("There is no nvcc on the PATH; it comes with the CUDA toolkit.")
    text, made = folder / "kernels.cu", folder / output
    text.write_text(source)
    kind = {".so": ["-shared", "-Xcompiler", "-fPIC"], ".ptx": ["-ptx"], ".cubin": ["-cubin"]}[made.suffix]
    flags = ["-O3", "-std=c++17", f"-arch={arch}", "-Xptxas", "-v", "-diag-suppress", "177", f"-I{HERE}"]
    done = subprocess.run(
        ["nvcc", *flags, *kind, "-o", str(made), str(text)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line]
        raise BuildError(f"nvcc could not compile the kernels: {(lines or ['it says nothing'])[0].strip()}")
    return made, done.stderr + done.stdout


def resources(said: str) -> dict[int, tuple[int, int]]:
    """Registers and spilled bytes of each kernel, by its place, from what ptxas said."""
    found, place, spilled = {}, None, 0
    for line in said.splitlines():
        if entry := re.search(r"Compiling entry function '.*?kernel_(\d+)", line):
            place = int(entry[1])
        elif "Compiling entry function" in line:
            place = None
        elif bytes_spilled := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(bytes_spilled[1]) + int(bytes_spilled[2])
        elif (used := re.search(r"Used (\d+) registers", line)) and place is not None:
            found[place] = (int(used[1]), spilled)
    return found


def _text(kernel: str) -> tuple[str, str]:
    """Helper functions and body."""
    text = re.sub(
        r'^#include "(\w+\.h)"$',
        lambda line: (METAL / line[1]).read_text(),
        (METAL / f"{kernel}.metal").read_text(),
        flags=re.M,
    )
    helpers, mark, body = text.partition(_BODY)
    if not mark:
        raise BuildError(f"{kernel}.metal has no line {_BODY.strip()!r}.")
    return for_cuda(helpers), for_cuda(body)


def for_cuda(text: str) -> str:
    """Said otherwise are only address spaces, of which CUDA names that of a block's arrays, clang's way to ask for unrolled loops, and a
    sum of two products: clang fuses the first one, nvcc this or that one."""
    text = re.sub(r"//.*|#include <metal_.*", "", text).replace("clang loop unroll(full)", "unroll")
    text = re.sub(r"\b(\w+) \* (\w+) \+ (\w+\[\w+\] \* \w+)(?= :)", r"fma(\1, \2, \3)", text)
    text = re.sub(r"^threadgroup (?=\w+ \w+\[)", "__shared__ ", text, flags=re.MULTILINE)
    text = re.sub(r"\b(device|threadgroup|thread|constant) ", "", text)
    return re.sub(r"^inline ", "__device__ __forceinline__ ", text, flags=re.MULTILINE)


def _function(launch: Launch, name: str, threads: int, body: str) -> str:
    inputs = [f"const {_CTYPES[a.dtype]}* __restrict__ {n}" for n, a in launch.inputs.items()]
    sizes = [f"const metal::Sizes {n}_shape" for n in sized_inputs(launch)]
    outputs = [f"{_CTYPES[np.dtype(dtype)]}* __restrict__ {n}" for n, (_, dtype) in launch.outputs.items()]
    values = "".join(
        f"  using {n} = {_TEMPLATE[value]};\n"
        if isinstance(value, str)
        else f"  constexpr int {n} = {value};\n"
        for n, value in launch.template.items()
    )
    parameters = ",\n    ".join([*inputs, *sizes, *outputs])
    return f"__global__ void __launch_bounds__({threads}) {name}(\n    {parameters}) {{\n{values}{ATTRIBUTES}{body}}}\n"


def _check_grid(launch: Launch) -> None:
    """Metal trims a grid that does not divide; CUDA would run the threads beyond it."""
    if any(g % t for g, t in zip(launch.grid, launch.threadgroup, strict=True)):
        raise BuildError(f"{launch.kernel}: the grid {launch.grid} is no multiple of {launch.threadgroup}.")
