"""Nodes of the graph and host time of forwards of real depth, beside mlx-lm's of the same shape: what a GPU waits for, whatever it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import pytest

from tests.models import deep
from tests.models.metal_graph import as_on_metal, blank, launches, nodes

DEPTHS = (24, 32, 64)
LENGTH = 300  # tokens that stand before
AT_MOST = 0.6  # of mlx-lm's nodes
_ROUNDS = 15


def our_forward(model: Any, width: int) -> tuple[Callable[[], list[mx.array]], list[float]]:
    """A plain step, or a verify behind another of which all but the last two tokens stand; and the seconds in which each was built: what
    it takes MLX to hand a graph over comes on top and is in proportion to its nodes."""
    cache = deep.filled(model, LENGTH)
    if width > 1:
        deep.forward(model, cache, [width])
        cache.commit([width - 2])
        cache.lengths = [LENGTH]

    def run() -> list[mx.array]:
        cache.abort()
        deep.cut(cache)
        started = time.perf_counter()
        logits, left = deep.forward(model, cache, [width], certain=width == 1)
        taken.append(time.perf_counter() - started)
        return [logits, *left]

    taken: list[float] = []
    return run, taken


def their_forward(model: Any, width: int) -> tuple[Callable[[], list[mx.array]], list[float]]:
    tokens, taken = blank((1, width), mx.int32), list[float]()

    def run() -> list[mx.array]:
        caches = deep.filled_like_mlx_lm(model, LENGTH)
        started = time.perf_counter()
        logits = model(tokens, caches)
        taken.append(time.perf_counter() - started)
        return [logits, *(x for c in caches for x in c.state if isinstance(x, mx.array))]

    return run, taken


def kernel_of_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recurrence as the one launch that it is on a Mac."""
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")

    def kernel(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, _: Any
    ) -> Any:
        return mx.depends(
            [blank(v.shape, q.dtype, "made"), blank(state.shape, state.dtype, "made")],
            [q, k, v, g, beta, state],
        )

    monkeypatch.setattr(gated_delta, "gated_delta_ops", kernel)


def row(monkeypatch: pytest.MonkeyPatch, depth: int, width: int) -> tuple[dict[str, float], dict[str, float]]:
    """Ours and mlx-lm's."""
    kernel_of_mlx_lm(monkeypatch)
    figures = []
    with as_on_metal(monkeypatch):
        for run, taken in (our_forward(deep.ours(depth), width), their_forward(deep.theirs(depth), width)):
            for _ in range(_ROUNDS):
                graph = run()
            figures.append(
                {
                    "nodes": float(nodes(graph).total()),
                    "launches": float(launches(graph).total()),
                    "us": 1e6 * statistics.median(taken),
                }
            )
    return figures[0], figures[1]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    "depth", [24, pytest.param(32, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]
)
def test_graphs_have_few_nodes(monkeypatch: pytest.MonkeyPatch, depth: int, width: int) -> None:
    ours, theirs = row(monkeypatch, depth, width)
    print(f"\n| {depth} | {width} | " + " | ".join(f"{ours[k]:.0f} / {theirs[k]:.0f}" for k in ours) + " |")
    assert ours["nodes"] <= AT_MOST * theirs["nodes"]
    assert ours["launches"] <= theirs["launches"]
