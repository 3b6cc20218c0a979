"""A stand-in for `mx.fast.cuda_kernel` where there is no GPU: keeps and checks what it is told, and has the emulator compute.

The emulator is given the Metal text that the kernel was made from. What nvcc makes of the CUDA text is for `nvcc` to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import emulator
import mlx.core as mx
import pytest

from mlxspec.kernels import cuda, launch
from mlxspec.platform import device
from mlxspec.platform.resources import metal_source

_MOST_THREADS = 1024
_METAL = re.compile(r"\b(device|threadgroup|constant|thread) |simdgroup_matrix>|clang loop")


@dataclass(frozen=True)
class Told:
    """One launch as MLX is told it: the kernel by name, source and header, and the call."""

    name: str
    source: str
    header: str
    inputs: dict[str, mx.array]
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]]
    template: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


class StandIn:
    """told: every launch, in order. computes: whether the emulator runs; otherwise outputs are zeros."""

    def __init__(self, *, computes: bool) -> None:
        self.computes = computes
        self.told: list[Told] = []

    def __call__(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Any:
        assert re.fullmatch(r"mlxspec_\w+", name)
        assert "#pragma once" not in header
        assert not _METAL.search(source + header.rpartition("METAL_NAMES")[2])
        own, emulated = name.removeprefix("mlxspec_"), None
        if self.computes:
            helpers, _, body = metal_source(own).partition(launch.BODY)
            names = {"input_names": input_names, "output_names": output_names}
            emulated = emulator.metal_kernel(name=name, source=body, header=helpers, **names)

        def call(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            check_threads(grid, threadgroup)
            assert all(isinstance(value, (int, mx.Dtype)) for _, value in template)
            told = Told(
                own,
                source,
                header,
                dict(zip(input_names, inputs, strict=True)),
                dict(zip(output_names, zip(output_shapes, output_dtypes, strict=True), strict=True)),
                dict(template),
                grid,
                threadgroup,
            )
            self.told.append(told)
            if emulated is None:
                return [mx.zeros(shape, dtype) for shape, dtype in told.outputs.values()]
            return emulated(
                inputs=inputs,
                template=template,
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=output_shapes,
                output_dtypes=output_dtypes,
            )

        return call


def check_threads(grid: Sequence[int], threadgroup: Sequence[int]) -> None:
    """CUDA takes whole blocks only, of whole warps here, as collectives name all lanes."""
    assert all(g > 0 and g % t == 0 for g, t in zip(grid, threadgroup, strict=True)), (grid, threadgroup)
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    assert threads % 32 == 0, threadgroup
    assert threads <= _MOST_THREADS, threadgroup


@contextmanager
def as_cuda(patch: pytest.MonkeyPatch, *, computes: bool) -> Iterator[StandIn]:
    """MLX seems to compute with CUDA: kernels are decided on and launched as there."""
    stand_in = StandIn(computes=computes)
    with patch.context() as inside:
        inside.setattr(device, "backend", lambda: "cuda")
        inside.setattr(mx.fast, "cuda_kernel", stand_in)
        inside.setattr(
            cuda, "metal_kernel", partial(cuda.metal_kernel)
        )  # what another stand-in built is not used
        launch.forget()
        yield stand_in
    launch.forget()
