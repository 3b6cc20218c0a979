"""Graphs of whole forwards as they would run on Metal, on any machine: counted, never evaluated.

Kernels, ours and MLX's fused ones, are stubs of one primitive each. Nothing is handed to a device: what would have been is recorded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxspec.platform import device  # before mlx

# isort: split
import mlx.core as mx
import pytest

from mlxspec.kernels import attention, launch

VIEWS = {
    *("Slice", "Reshape", "ExpandDims", "Squeeze", "Split", "Broadcast", "Transpose", "Flatten", "Unflatten"),
    "StopGradient",
    "View",  # of the same size: another name for the same bytes
}
ELEMENTWISE = {
    *(
        "Abs",
        "Add",
        "AsType",
        "BitwiseBinary",
        "Divide",
        "Equal",
        "Exp",
        "Floor",
        "Greater",
        "GreaterEqual",
        "Less",
        "LessEqual",
        "Log",
    ),
    *(
        "Log1p",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Multiply",
        "Negative",
        "NotEqual",
        "Power",
        "Remainder",
    ),
    *("Round", "Select", "Sigmoid", "Sign", "Sqrt", "Square", "Subtract", "Tanh"),
}  # what MLX compiles into one kernel with its neighbours
GATHERS = {"Gather", "GatherAxis"}
KERNELS = ("gdn_round", "conv_qkv", "gdn_prefill", "qmv_rows")
evaluate = mx.eval  # tests that let nothing be evaluated put another in its place
_blanks: dict[tuple[tuple[int, ...], mx.Dtype, str], mx.array] = {}


def blank(shape: Sequence[int], dtype: mx.Dtype, use: str = "given") -> mx.array:
    """An array that is evaluated already. use: arrays of one use are one array; a compiled function must not hold what it is given."""
    key = tuple(shape), dtype, use
    if key not in _blanks:
        _blanks[key] = mx.zeros(key[0], dtype)
        evaluate(_blanks[key])
    return _blanks[key]


def fresh(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """One that nobody else has, as it will be written in place."""
    made = mx.zeros(tuple(shape), dtype)
    evaluate(made)
    return made


def one_primitive(
    inputs: Sequence[mx.array], outputs: Sequence[tuple[Sequence[int], mx.Dtype]]
) -> list[mx.array]:
    return mx.depends([blank(*output, "made") for output in outputs], list(inputs))


class Stubs:
    """A factory like `mx.fast.metal_kernel`. variants: what MLX would compile, (name, template, kinds of inputs), for each kernel."""

    def __init__(self) -> None:
        self.variants: set[tuple[Any, ...]] = set()
        self.names: Counter[str] = Counter()

    def __call__(self, *, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        def call(
            *, inputs: Sequence[Any], output_shapes: Any, output_dtypes: Any, template: Any, **_: Any
        ) -> list[mx.array]:
            kinds = tuple((x.dtype, x.ndim, x.size < 8) for x in inputs)  # MLX's signature of an input
            self.variants.add((name, tuple(template), kinds))
            self.names[name] += 1
            return one_primitive(inputs, list(zip(output_shapes, output_dtypes, strict=True)))

        return call


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """One kernel for operands of one dtype, as MLX has it: others are converted first."""
    operands = [x] if weight is None else [x, weight]
    dtype = mx.result_type(*operands)
    return one_primitive([operand.astype(dtype) for operand in operands], [(x.shape, dtype)])[0]


def _attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **_: Any) -> mx.array:
    masks = [mask] if isinstance(mask, mx.array) else []
    return one_primitive([q, k, v, *masks], [((*q.shape[:3], v.shape[3]), q.dtype)])[0]


def _dequantize(
    w: mx.array, scales: mx.array, biases: mx.array, *_: Any, bits: int = 4, **__: Any
) -> mx.array:
    return one_primitive([w, scales, biases], [((*w.shape[:-1], w.shape[-1] * 32 // bits), scales.dtype)])[0]


def _rope(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return one_primitive([x], [(x.shape, x.dtype)])[0]


class Recorder:
    """Stands in for `mx.async_eval`: what would have been handed over, in order."""

    def __init__(self) -> None:
        self.handed: list[list[mx.array]] = []

    def __call__(self, *arrays: Any) -> None:
        self.handed.append([x for a in arrays for x in (a if isinstance(a, (list, tuple)) else [a])])


@contextmanager
def as_on_metal(
    monkeypatch: pytest.MonkeyPatch, *, without: Sequence[str] = ()
) -> Iterator[tuple[Stubs, Recorder]]:
    """Inside, this is a Mac whose kernels have passed their self-checks, but for those in `without`, and nothing is evaluated.

    Compiling is on: graphs are traced and simplified as they would be, and no g++ runs, since nothing is evaluated."""
    stubs, recorder = Stubs(), Recorder()
    reports = {
        name: launch.KernelReport(name=name, in_use=name not in without, reason="a stub") for name in KERNELS
    }
    with monkeypatch.context() as patch, launch.using(stubs):
        patch.setattr(launch, "_reports", reports)
        patch.setattr(device, "backend", lambda: "metal")
        patch.setattr(device, "compile_enabled", lambda: True)
        patch.setattr(attention, "has_kernel", lambda heads: True)
        patch.setattr(mx.fast, "rms_norm", _rms_norm)
        patch.setattr(mx.fast, "scaled_dot_product_attention", _attention)
        patch.setattr(mx.fast, "rope", _rope)
        patch.setattr(mx, "dequantize", _dequantize)
        patch.setattr(mx, "async_eval", recorder)
        mx.enable_compile()
        try:
            yield stubs, recorder
        finally:
            if not device_compiles:
                mx.disable_compile()


device_compiles = device.compile_enabled()


def nodes(outputs: Sequence[mx.array]) -> Counter[str]:
    """Primitives of the graph behind `outputs`, by name, views among them."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        return Counter(re.findall(r'\[label ="(\w+)", shape=rectangle\]', file.read_text()))


def launches(outputs: Sequence[mx.array]) -> Counter[str]:
    """Those that Metal needs a kernel for."""
    return Counter({name: num for name, num in nodes(outputs).items() if name not in VIEWS})


def bytes_moved(work: Callable[..., Any], *given: mx.array) -> int:
    """Bytes that the kernels of `work` read and write on Metal, by the shapes in its graph.

    Elementwise steps of one shape that follow one another are one kernel; MLX's bound on a kernel's depth is left out. A gather reads its
    indices and what it gives. A broadcast is as large as what it repeats.
    """
    steps: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.array, "__invert__", lambda x: x ^ mx.array(-1, x.dtype))  # ~ cannot be exported
        mx.disable_compile()
        mx.export_function(steps.append, work, *given)
    steps = [step for step in steps if step["type"] == "primitive"]
    sizes = {
        name: math.prod(shape) * dtype.size
        for step in steps
        for name, shape, dtype in (*step["inputs"], *step["outputs"])
    }
    users: dict[str, list[Any]] = {name: [] for name in sizes}
    for step in steps:
        for name, *_ in step["inputs"]:
            users[name].append(step)
        if step["name"] in VIEWS:
            for name, *_ in step["outputs"]:
                sizes[name] = min(sizes[name], sizes[step["inputs"][0][0]])
    kernel_of: dict[str, int] = {}  # by the name of an output
    for number, step in reversed([*enumerate(steps)]):
        first, shape, _ = step["outputs"][0]
        behind = {
            kernel_of[user["outputs"][0][0]]
            if user["name"] in ELEMENTWISE and user["outputs"][0][1] == shape
            else None
            for user in users[first]
        }
        joined = behind.pop() if step["name"] in ELEMENTWISE and len(behind) == 1 else None
        for name, *_ in step["outputs"]:
            kernel_of[name] = number if joined is None else joined
    moved: set[tuple[str, int, str]] = set()  # a kernel reads and writes an array once
    for step in steps:
        if step["name"] in VIEWS:
            continue
        kernel = kernel_of[step["outputs"][0][0]]
        inputs, outputs = ([name for name, *_ in step[side]] for side in ("inputs", "outputs"))
        if step["name"] in GATHERS:
            inputs[0] = outputs[0]
        moved |= {
            ("read", kernel, name) for name in inputs if name in outputs or kernel_of.get(name) != kernel
        }
        moved |= {
            ("write", kernel, name)
            for name in outputs
            if not users[name] or any(kernel_of[user["outputs"][0][0]] != kernel for user in users[name])
        }
    return sum(sizes[name] for *_, name in moved)
