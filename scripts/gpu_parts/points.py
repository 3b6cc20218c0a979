"""What is known to go wrong or slow on Apple GPUs, checked by counts and not by times where that is possible.

A check gives True where mlxspec does what it should, False where it does not, None where this machine cannot tell, and a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import compile_kernels
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.kernels import conv_qkv, launch
from mlxspec.kernels.flat import LADDER, FlatRows
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.platform import device

from .base import Here, Skipped, table
from .model import Model

MOST_PIECES = 600  # longest prompt of which every piece length is launched
MOST_VARIANTS = 4  # of conv_qkv over those lengths
LEAST_CHUNK = 2048  # tokens of a prompt that a GPU reads at once


class Found(NamedTuple):
    """right: None where this machine cannot tell."""

    right: bool | None
    said: str


def points(model: Model, here: Here) -> None:
    """All of them, one line each."""
    checks: dict[str, Callable[[Model], Found]] = {
        "float32 products keep float32": _tf32,
        "--exact leaves widths to draft with": _exact,
        "rows of qmv_rows have the bits of MLX's own rows": _bits,
        "norms are in the model's dtype": _norms,
        "prompt lengths share compiled kernels": _variants,
        "prompts run the recurrence in kernels": _recurrence,
        "prompts are read in large chunks": _chunk,
        "qmv_rows was raced at this model's shapes": _raced,
        "rounds that wait hand work over early": _partial,
        "each width of policy auto's rounds was run": _widths,
        "memory is wired without an error": _wired,
    }
    rows, wrong = [], []
    for title, check in checks.items():
        try:
            found = check(model)
        except Skipped as why:
            found = Found(None, str(why))
        rows.append([title, {True: "yes", False: "NO", None: "-"}[found.right], found.said])
        if found.right is False:
            wrong.append(f"{title}: NO ({found.said})")
    table(["what", "holds", "found"], rows)
    held = sum(row[1] == "yes" for row in rows)
    here.summary.append(
        f"known pitfalls: {held} of {len(rows)} avoided, {len(wrong)} not, others cannot be told here"
    )
    here.summary.extend(f"  {line}" for line in wrong)


def _tf32(_: Model) -> Found:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((256, 256), np.float32) for _ in range(2))
    wanted = a.astype(np.float64) @ b
    error = float(np.abs(np.array(mx.array(a) @ mx.array(b)) - wanted).max() / np.abs(wanted).max())
    return Found(error < 1e-5, f"largest error {error:.1e}")


def _exact(model: Model) -> Found:
    engine = mlxspec.load(
        model.folder,
        draft="mtp",
        spec=SpecConfig(drafters=("mtp",), policy="fixed", n_max=4),
        config=EngineConfig(exact=True, prefix_budget=0, max_rows=1),
    )
    width = engine.probe(range(2, 9)).exact_width
    engine.close()
    return Found(width >= 2, f"up to {width} tokens at once have the bits of plain steps")


def _bits(_: Model) -> Found:
    report = next(r for r in launch.reports() if r.name == "qmv_rows")
    if not report.in_use:
        raise Skipped(report.reason)
    return Found(report.matches_mlx, report.note)


def _norms(model: Model) -> Found:
    dtype = model.engine.model.dtype
    parameters = tree_flatten(model.engine.model.parameters())  # type: ignore[attr-defined]
    norms = [value for path, value in parameters if path.endswith("norm.weight")]
    other = sum(value.dtype != dtype for value in norms)
    name = str(dtype).removeprefix("mlx.core.")
    return Found(other == 0, f"{other} of {len(norms)} norm weights are not {name}")


def _variants(_: Model) -> Found:
    recorder = compile_kernels.Recorder()
    shape = compile_kernels.shapes()[0]
    weights = conv_qkv.ConvWeights(
        mx.zeros((4, shape.conv_size)), mx.zeros(shape.num_v_heads), mx.zeros(shape.num_v_heads)
    )
    window = mx.zeros((1, 3, shape.conv_size))
    with launch.using(recorder):
        for length in range(1, MOST_PIECES + 1):
            projected = mx.zeros((length, shape.conv_size + shape.num_v_heads * (shape.v_dim + 2)))
            rows = RowLayout.of(FlatRows((length,)))
            conv_qkv.conv_qkv_metal(projected, window, weights, shape, rows, certain=True)
    count = len({variant.template for variant in recorder.texts})
    said = f"{count} variants of conv_qkv for prompts of 1 to {MOST_PIECES} tokens"
    return Found(count <= MOST_VARIANTS, said)


def _recurrence(model: Model) -> Found:
    if not model.here.has_metal:
        raise Skipped("there is no Metal here")
    names: list[str] = []
    with _watched(names):
        _forward(model, 512)
    used = sorted({name for name in names if name.startswith("gdn")})
    return Found(bool(used), f"a piece of 512 tokens launches {', '.join(used) or 'none'}")


def _chunk(model: Model) -> Found:
    chunk = model.engine.memory.chunk
    if not device.has_gpu():
        return Found(None, f"{chunk} tokens on a CPU")
    return Found(chunk >= LEAST_CHUNK, f"{chunk} tokens")


def _raced(model: Model) -> Found:
    if not model.here.has_metal:
        raise Skipped("there is no Metal here")
    ratios = launch.speedups().get("qmv_rows", {})
    won = sum(ratio >= 1.02 for ratio in ratios.values())
    return Found(bool(ratios), f"{won} of {len(ratios)} races won")


def _partial(model: Model) -> Found:
    """Calls of async_eval while a round that waits is built: none means that the GPU is idle until the whole round is there."""
    if not device.has_gpu():
        raise Skipped("there is no GPU here")
    calls: list[int] = []
    handed_over = mx.async_eval

    def counted(*arrays: Any) -> None:
        calls.append(1)
        handed_over(*arrays)

    pipeline = model.engine.pipeline
    before, pipeline.overlaps = pipeline.overlaps, False
    mx.async_eval = counted
    try:
        spec = SpecConfig(drafters=("mtp",), policy="fixed", n_max=3)
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        stats = model.engine.generate(model.prompt(64), params, spec=spec).stats
    finally:
        mx.async_eval = handed_over
        pipeline.overlaps = before
    each = len(calls) / max(1, stats.num_rounds)
    return Found(each >= 1, f"{each:.1f} times a round")


def _widths(model: Model) -> Found:
    """Whether the rounds that policy auto decides by were run at each width of its ladder."""
    known = model.costs.curve(0).known
    missing = [str(w) for w in LADDER if w <= 16 and w not in known]
    told = " ".join(f"{w}:{s / known[1]:.2f}" for w, s in known.items())
    return Found(
        not missing, f"rounds by width, in plain ones: {told}; not run: {', '.join(missing) or 'none'}"
    )


def _wired(model: Model) -> Found:
    if not model.here.has_metal:
        raise Skipped("there is no Metal here")
    mx.async_eval(mx.random.normal((1024, 1024)) @ mx.random.normal((1024, 1024)))
    device.release(model.engine.memory)
    device.claim(model.engine.memory, 1 << 28, 1 << 26)
    stats = model.run(64, 8)
    return Found(stats.num_generated == 8, "the limit was set beside running work")


def _forward(model: Model, length: int) -> None:
    """One piece of a prompt, evaluated."""
    cache = model.engine.model.make_cache(1)
    out = model.engine.model.forward(mx.array(model.prompt(length)), FlatRows((length,)), cache, certain=True)
    cache.commit()
    mx.eval(out.logits, cache.arrays)


class _watched:
    """Inside, names of launched kernels are appended to `names`."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        self._call = launch.MetalKernel.__call__

        def call(kernel: launch.MetalKernel, *arguments: Any, **settings: Any) -> list[mx.array]:
            self._names.append(kernel.name)
            return self._call(kernel, *arguments, **settings)

        launch.MetalKernel.__call__ = call  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        launch.MetalKernel.__call__ = self._call  # type: ignore[method-assign]
