"""What nvcc makes of launches as `cuda_stand_in` keeps them: whether it takes the text, registers, spills, and instructions of loops.

A kernel is written as MLX writes it for NVRTC (mlx/backend/cuda/custom_kernel.cpp), with a few lines for MLX's own headers. Needs nvcc, for
instructions nvdisasm too; no GPU. A product of 8 x 8 matrices, one instruction of an Apple GPU, counts as one where instructions are
counted; a conversion of a half counts, which an Apple GPU does for nothing where the half is read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from cuda_stand_in import Told

_ARCH = "sm_90"
_MLX = """#include <stdint.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
struct Shape { int32_t of[8]; __device__ int32_t operator[](int i) const { return of[i]; } };
"""
_COUNTS = "#define METAL_COUNTS_INSTRUCTIONS\n"
_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}
_INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)(?:\s+(.*?))?\s*;")


@dataclass(frozen=True)
class Made:
    """What became of one launch. loop: instructions of its longest loop, 0 where they were not counted."""

    registers: int
    spilled: int
    loop: int = 0


def missing(*, counts: bool = False) -> str | None:
    """Why nothing can be compiled, or counted, here, or None."""
    tools = ("nvcc", "nvdisasm") if counts else ("nvcc",)
    return next((f"there is no {tool}" for tool in tools if shutil.which(tool) is None), None)


def compiled(launches: Sequence[Told], folder: Path, *, counts: bool = False) -> list[Made]:
    """Each launch's kernel, compiled. Raises AssertionError with what nvcc says where it refuses one."""
    found: dict[str, Made] = {}
    for name in dict.fromkeys(told.name for told in launches):
        texts = {kernel(t): t for t in launches if t.name == name}
        source = folder / f"{name}.cu"
        header = next(iter(texts.values())).header
        source.write_text((_COUNTS if counts else "") + _MLX + header + _placed(texts))
        cubin = source.with_suffix(".cubin")
        flags = ["-O3", "-std=c++17", f"-arch={_ARCH}", "-Xptxas", "-v", "-diag-suppress", "177", "-cubin"]
        command = ["nvcc", *flags, "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        loops = _loops(cubin) if counts else {}
        for place, (registers, spilled) in _resources(done.stderr + done.stdout).items():
            found[list(texts)[place]] = Made(registers, spilled, loops.get(place, 0))
    return [found[kernel(told)] for told in launches]


def kernel(told: Told) -> str:
    """The function as MLX writes it, without its name."""
    parameters = []
    for name, x in told.inputs.items():
        parameters.append(f"const {_TYPES[x.dtype]}* {name}")
        if x.ndim and f"{name}_shape" in told.source:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
    parameters += [f"{_TYPES[dtype]}* {name}" for name, (_, dtype) in told.outputs.items()]
    values = "".join(
        f"using {name} = {_TYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"constexpr int {name} = {int(value)};\n"
        for name, value in told.template.items()
    )
    return f"({', '.join(parameters)}) {{\n{values}{told.source}\n}}\n"


def _placed(texts: dict[str, Told]) -> str:
    return "namespace mlx::core::cu {\n%s}\n" % "".join(  # noqa: UP031 (braces)
        f"__global__ void __launch_bounds__({_threads(told)}) kernel_{place}{text}"
        for place, (text, told) in enumerate(texts.items())
    )


def _threads(told: Told) -> int:
    return told.threadgroup[0] * told.threadgroup[1] * told.threadgroup[2]


def _resources(said: str) -> dict[int, tuple[int, int]]:
    """Registers and spilled bytes by place, from what ptxas said."""
    found, place, spilled = {}, 0, 0
    for line in said.splitlines():
        if entry := re.search(r"Compiling entry function '.*?kernel_(\d+)", line):
            place = int(entry[1])
        elif stores := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(stores[1]) + int(stores[2])
        elif used := re.search(r"Used (\d+) registers", line):
            found[place] = (int(used[1]), spilled)
    return found


def _loops(cubin: Path) -> dict[int, int]:
    """Instructions of each kernel's longest loop, by place."""
    done = subprocess.run(["nvdisasm", "-c", str(cubin)], capture_output=True, text=True, check=True)
    return {
        int(found[1]): _longest_loop(text)
        for text in re.split(r"^//-{5,}", done.stdout, flags=re.M)
        if (found := re.search(r"^\.text\.\S*?kernel_(\d+)\D", text, re.M))
    }


def _longest_loop(text: str) -> int:
    labels: dict[str, int] = {}
    num, longest = 0, 0
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = num
        elif found := _INSTRUCTION.match(line):
            num += 1
            to = re.search(r"\.L_x_\d+", found[2] or "")
            if found[1].startswith("BRA") and to and to[0] in labels:
                longest = max(longest, num - labels[to[0]])
    return longest
