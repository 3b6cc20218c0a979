"""The GPU through ctypes: memory, launches, times. Knows compiled kernels by their place; does not know what they compute."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .build import sized_inputs
from .cases import Launch

COPY, DRIVER_COPY = -1, -2  # places that stand for a copy by a kernel and by the driver
_POISON = 0xFF  # floats that were never written are not numbers


class GpuError(Exception):
    """What CUDA said, in a sentence."""


class _Shape(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3)]


class _Sizes(ctypes.Structure):
    _fields_ = [("of", ctypes.c_int * 4)]


def missing_gpu() -> str | None:
    """Why nothing can run here, or None. Asks the driver, so nothing has to be compiled first."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver here"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    return None


class Arguments:
    """A kernel's parameters in device memory: its inputs, sizes that it reads, its outputs."""

    def __init__(self, launch: Launch, places: Sequence[ctypes.c_void_p]) -> None:
        sizes = [_Sizes((ctypes.c_int * 4)(*launch.inputs[name].shape)) for name in sized_inputs(launch)]
        split = len(launch.inputs)
        self._values = [*places[:split], *sizes, *places[split:]]  # kept alive: CUDA is given their addresses
        addresses = [ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in self._values]
        self.array = (ctypes.c_void_p * len(addresses))(*addresses)


class Gpu:
    """The first GPU, with a library made by `build`. Attributes: name, compute (such as "9.0"), num_cores, l2_bytes, driver."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.gpu_error.restype = ctypes.c_char_p
        name, numbers = ctypes.create_string_buffer(256), (ctypes.c_int * 5)()
        self._call("gpu_device", name, numbers)
        self.name = name.value.decode()
        self.compute = f"{numbers[0]}.{numbers[1]}"
        self.num_cores, self.l2_bytes = numbers[2], numbers[3]
        self.driver = f"{numbers[4] // 1000}.{numbers[4] % 1000 // 10}"

    def run(self, place: int, launch: Launch) -> dict[str, Any]:
        """The launch's outputs, in memory that was poisoned before."""
        with self._memory(launch) as places:
            arguments = Arguments(launch, places)
            self._call("gpu_run", place, ctypes.byref(_shape(launch)), arguments.array)
            found = {}
            for at, (name, (shape, dtype)) in enumerate(launch.outputs.items(), len(launch.inputs)):
                found[name] = np.empty(shape, dtype)
                self._call(
                    "gpu_read", found[name].ctypes.data_as(ctypes.c_void_p), places[at], _size(found[name])
                )
        return found

    def time(self, place: int, launch: Launch, *, num_sets: int, rounds: int) -> float:
        """Median seconds of one launch among `num_sets` behind one another, each with memory of its own, so that caches help little."""
        with _all(self._memory(launch) for _ in range(num_sets)) as many:
            sets = [Arguments(launch, places) for places in many]
            return self._time(place, _shape(launch), [s.array for s in sets], 0, rounds)

    def time_copy(self, num_bytes: int, *, num_sets: int, rounds: int, by_driver: bool = False) -> float:
        """Median seconds to copy `num_bytes` (a multiple of 16), in the same way."""
        with _all(self._blocks([num_bytes, num_bytes]) for _ in range(num_sets)) as many:
            sets = [(ctypes.c_void_p * 2)(pair[0].value, pair[1].value) for pair in many]
            return self._time(DRIVER_COPY if by_driver else COPY, _Shape(), sets, num_bytes, rounds)

    def _time(self, place: int, shape: _Shape, sets: Sequence[Any], num_bytes: int, rounds: int) -> float:
        addresses = (ctypes.c_void_p * len(sets))(*(ctypes.cast(s, ctypes.c_void_p) for s in sets))
        found = (ctypes.c_float * rounds)()
        self._call(
            "gpu_time",
            place,
            ctypes.byref(shape),
            addresses,
            len(sets),
            ctypes.c_size_t(num_bytes),
            rounds,
            found,
        )
        return statistics.median(found) / 1e3 / len(sets)

    @contextmanager
    def _memory(self, launch: Launch) -> Iterator[list[ctypes.c_void_p]]:
        """The launch's inputs, and its outputs poisoned."""
        outputs = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in launch.outputs.values()]
        arrays = [np.ascontiguousarray(a) for a in launch.inputs.values()]
        with self._blocks([a.nbytes for a in arrays] + outputs) as places:
            for array, place in zip(arrays, places[: len(arrays)], strict=True):
                self._call("gpu_write", place, array.ctypes.data_as(ctypes.c_void_p), _size(array))
            yield places

    @contextmanager
    def _blocks(self, sizes: Sequence[int]) -> Iterator[list[ctypes.c_void_p]]:
        places: list[ctypes.c_void_p] = []
        try:
            for size in sizes:
                place = ctypes.c_void_p()
                self._call("gpu_allocate", ctypes.byref(place), ctypes.c_size_t(size))
                places.append(place)
                self._call("gpu_fill", place, _POISON, ctypes.c_size_t(size))
            yield places
        finally:
            for place in places:
                self._lib.gpu_free(place)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._lib, function)(*arguments)
        if code:
            raise GpuError(
                f"{function.removeprefix('gpu_')} failed on the GPU: {self._lib.gpu_error(code).decode()}."
            )


@contextmanager
def _all(contexts: Iterable[Any]) -> Iterator[list[Any]]:
    """Enter all, leave all."""
    with ExitStack() as stack:
        yield [stack.enter_context(context) for context in contexts]


def _shape(launch: Launch) -> _Shape:
    """Metal counts threads, CUDA blocks."""
    blocks = [g // t for g, t in zip(launch.grid, launch.threadgroup, strict=True)]
    return _Shape((ctypes.c_uint * 3)(*blocks), (ctypes.c_uint * 3)(*launch.threadgroup))


def _size(array: Any) -> ctypes.c_size_t:
    return ctypes.c_size_t(array.nbytes)
