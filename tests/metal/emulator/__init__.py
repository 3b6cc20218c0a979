"""An `mx.fast.metal_kernel` that runs on the CPU: the same signature, the same generated source, every memory access checked.

MLX itself writes the complete Metal source (recorded by `mx.export_function`, which needs no Metal); `translate` makes it a C++ unit, the
system's compiler builds it, runtime.cpp runs the grid. Where libclang is, `front_end` reads the source first and refuses what Apple's
compiler would. Knows nothing of our kernels. What it cannot show: speed, register pressure, how Apple's exp rounds, and memory ordering
between threadgroups.
"""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import compiler, front_end
from .compiler import EmulationError, build, missing_compiler
from .translate import Parameter, parse, translate

__all__ = [
    "EmulationError",
    "Run",
    "Settings",
    "build_cache",
    "front_end",
    "metal_kernel",
    "missing_compiler",
    "runs",
    "settings",
]

_real_metal_kernel = mx.fast.metal_kernel
_GUARD = 4096  # bytes around each buffer; also an allocation's alignment
_POISON = 0xFF  # unwritten floats are NaN
_ORDERS = ("forward", "reverse", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How kernels run: `order` of lanes, simdgroups and threadgroups (forward, reverse, random), `seed` of the random one, whether the
    compiler may `contract` a * b + c into one rounding, as Apple's may, and whether conversions of denormal halves `flush` them to zero."""

    order: str = "forward"
    seed: int = 1
    contract: bool = False
    flush: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """One launch: its template arguments, and bytes by buffer name. bytes_read and bytes_written count each byte once per threadgroup that
    touched it, as if a threadgroup had a perfect cache; bytes_loaded adds up all loads of all threads, as if there were no cache."""

    kernel: str
    template: dict[str, Any]
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    bytes_loaded: dict[str, int]
    num_meetings: int

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_read.values()) + sum(self.bytes_written.values())


runs: list[Run] = []  # newest last; clear it before what you want to count
_current = Settings()


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Run kernels differently inside."""
    global _current
    before, _current = _current, dataclasses.replace(_current, **changes)
    try:
        yield _current
    finally:
        _current = before


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_ulong),
        ("writable", ctypes.c_int),
        ("initialised", ctypes.c_int),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
        ("bytes_loaded", ctypes.c_uint64),
    )


class metal_kernel:
    """Constructed and called like `mx.fast.metal_kernel`; evaluates at once, so it cannot be used inside mx.compile."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, Any] | None = None,
    ) -> None:
        if atomic_outputs or not ensure_row_contiguous:
            raise NotImplementedError("the emulator knows plain outputs and row-contiguous inputs only")
        self.name, self.input_names, self.output_names = name, list(input_names), list(output_names)
        self._body, self._sources = source, {}
        self._real = _real_metal_kernel(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            header=header,
            compile_options=compile_options,
        )

    def metal_source(self, inputs: Sequence[mx.array], **call: Any) -> str:
        """The Metal source that MLX generates for this call."""
        seen: list[dict[str, Any]] = []
        mx.export_function(seen.append, lambda *arrays: self._real(inputs=list(arrays), **call), *inputs)
        found = [
            e["arguments"] for e in seen if e.get("type") == "primitive" and e.get("name") == "CustomKernel"
        ]
        return str(found[0][1])

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(arrays)
        key = (
            tuple((a.dtype, a.ndim, a.size < 8) for a in arrays),
            tuple(output_dtypes),
            tuple(template or ()),
        )
        if key not in self._sources:
            shapes = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
            text = self.metal_source(arrays, grid=grid, threadgroup=threadgroup, template=template, **shapes)
            parameters = parse(text)
            unit = translate(text, self._body, parameters)
            is_ours = not self.name.startswith("mlx_")  # Apple's compiler has taken what MLX brings
            if is_ours and not front_end.missing() and (refusals := front_end.refusals(text)):
                raise EmulationError(f"Metal does not take the kernel: {'; '.join(refusals)}")
            self._sources[key] = parameters, unit
        parameters, unit = self._sources[key]
        contents = [
            _bytes_for(p, dict(zip(self.input_names, arrays, strict=True)))
            for p in parameters[: -len(output_shapes)]
        ]
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            size = int(np.prod(shape)) * dtype.size
            filled = np.full(size, _POISON, np.uint8)
            contents.append(
                filled if init_value is None else _bytes_of(mx.full(tuple(shape), init_value, dtype))
            )
        raw = _run(
            self.name,
            dict(template or ()),
            build(unit, contract=_current.contract, flush=_current.flush),
            parameters,
            contents,
            len(output_shapes),
            grid,
            threadgroup,
            init_value is not None,
        )
        return [_array(r, s, d) for r, s, d in zip(raw, output_shapes, output_dtypes, strict=True)]


def _run(
    kernel: str,
    template: dict[str, Any],
    library: ctypes.CDLL,
    parameters: Sequence[Parameter],
    contents: Sequence[np.ndarray],
    num_outputs: int,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    initialised: bool,
) -> list[np.ndarray]:
    num_inputs = len(contents) - num_outputs
    memory, buffers = [], (_Buffer * len(contents))()
    for i, (parameter, content) in enumerate(zip(parameters, contents, strict=True)):
        space = np.full(content.size + 3 * _GUARD, _POISON, np.uint8)
        start = 2 * _GUARD - space.ctypes.data % _GUARD
        space[start : start + content.size] = content
        memory.append((space, start))
        is_output = i >= num_inputs
        buffers[i] = _Buffer(
            parameter.name.encode(),
            space.ctypes.data + start,
            content.size,
            is_output,
            initialised or not is_output,
        )
    text, where, meetings = ctypes.create_string_buffer(512), ctypes.c_void_p(), ctypes.c_uint64()
    three = ctypes.c_uint * 3
    failed = library.emu_run(
        buffers, len(contents), three(*grid), three(*threadgroup), _ORDERS.index(_current.order), ctypes.c_ulong(_current.seed),
        text, ctypes.c_size_t(len(text)), ctypes.byref(where), ctypes.byref(meetings),
    )  # fmt: skip
    if failed:
        raise EmulationError(f"{kernel}: {text.value.decode()}{_line_of(library, where.value)}")
    names = [p.name for p in parameters]
    reads = {n: b.bytes_read for n, b in zip(names, buffers, strict=True)}
    writes = {n: b.bytes_written for n, b in zip(names, buffers, strict=True) if b.writable}
    loads = {n: b.bytes_loaded for n, b in zip(names, buffers, strict=True)}
    runs.append(Run(kernel, template, reads, writes, loads, meetings.value))
    return [
        space[start : start + c.size]
        for (space, start), c in zip(memory[num_inputs:], contents[num_inputs:], strict=True)
    ]


def _line_of(library: ctypes.CDLL, address: int | None) -> str:
    """ ", FILE:LINE" of an instruction in the kernel, or nothing where addr2line is not there."""
    if not address:
        return ""
    base = ctypes.cast(library.emu_run, ctypes.c_void_p).value - compiler.symbol_offset(library._name)  # type: ignore[operator]
    try:
        command = ["addr2line", "-e", library._name, hex(address - 1 - base)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", {found.rsplit('/', 1)[-1].split(' ')[0]}"


def _bytes_for(parameter: Parameter, arrays: dict[str, mx.array]) -> np.ndarray:
    """What MLX binds to an input parameter: the array, or its shape, strides or rank."""
    if parameter.name in arrays:
        return _bytes_of(arrays[parameter.name])
    name, _, what = parameter.name.rpartition("_")
    shape = arrays[name].shape
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    value = {
        "shape": np.array(shape, np.int32),
        "strides": np.array(strides, np.int64),
        "ndim": np.array([len(shape)], np.int32),
    }
    return value[what].view(np.uint8)


def _bytes_of(x: mx.array) -> np.ndarray:
    plain = np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    return np.ascontiguousarray(plain).reshape(-1).view(np.uint8)


def _array(raw: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    name = "uint16" if dtype == mx.bfloat16 else str(dtype).rpartition(".")[-1]
    x = mx.array(raw.copy().view(name).reshape(tuple(shape)))
    return x.view(mx.bfloat16) if dtype == mx.bfloat16 else x


def build_cache(folder: Path) -> None:
    """Keep compiled kernels there."""
    compiler.cache = folder
