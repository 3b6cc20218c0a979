#!/usr/bin/env python3
"""What each way of rollback holds, moves, launches and takes in one Gated DeltaNet layer, for the layers of published models; one table.

    scripts/bench_rollback [--models 27B ...] [--widths 1 4 ...] [--no-time] [--rounds 5] [--json FILE]

One row, bfloat16, every token of the last forward kept. Snapshots keep as many states as taking back all drafts of that width needs (a
verify of w tokens has w - 1), two at least.

held      bytes of the layer's cache between two rounds: state or states, tape or inputs, convolution window and inputs; then of all such
          layers of the model
moved     bytes the recurrence of a round must move on Metal, counted from shapes: every launch reads each input and writes each output once
least     the same without any rollback: the state read and written once, the tokens' inputs read, y written. What the kernel moves
          really, by the emulator's count, stands in docs/kernels.md
launches  Metal kernels between the layer's two projections (convolution, norms and gates; recurrence; what rollback needs besides),
          counted in the compiled graph with our kernels as stubs: nothing runs
CPU       time of the same stretch in plain MLX operations on this CPU, median of alternating rounds, and over `plain`: the tokens in
          steps with nothing to take back. Says nothing about Apple GPUs; on a CPU the engine's `tape` holds the states that the verify
          passed where they are small, which this does not time. Needs an otherwise idle machine to mean anything
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
import numpy as np
from alternating import alternate, median, ratio

from mlxspec.cache.rollback import TAPE, Checkpoint, RecurrentState, Rollback, Snapshots, Stood
from mlxspec.kernels import launch
from mlxspec.kernels.conv_ops import GdnInputs, GdnShape
from mlxspec.kernels.conv_qkv import ConvWeights, KeptInputs, conv_qkv
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import RowLayout, gdn_facts

MODELS = {"0.8B": (16, 18), "9B": (32, 24), "35B-A3B": (32, 30), "27B": (48, 48)}  # value heads, GDN layers
WIDTHS = (1, 2, 4, 8, 16, 64)
WAYS = ("tape", "snapshots", "checkpoint")
VIEWS = {
    "Slice",
    "Reshape",
    "ExpandDims",
    "Squeeze",
    "Split",
    "Broadcast",
    "Transpose",
    "Flatten",
    "Unflatten",
}
COLUMNS = (
    *(
        "model",
        "width",
        "way",
        "held a layer, MB",
        "held a model, MB",
        "moved, MB",
        "least, MB",
        "moved / least",
    ),
    *("launches", "CPU, ms", "CPU / plain"),
)
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--no-time", action="store_true", help="only what is counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    with device.private_kernels():
        device.decode_threads()
        timed: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
        for model in options.models:
            heads, num_layers = MODELS[model]
            layer = Layer(heads)
            for width in options.widths:
                if not options.no_time and (heads, width) not in timed:
                    timed[heads, width] = times(layer, width, options.rounds)
                for way in WAYS:
                    line = {"model": model, "width": width, "way": way} | counted(
                        layer, way, width, num_layers
                    )
                    line |= timed.get((heads, width), {}).get(way, {})
                    lines.append(line)
                    print(shown(line), flush=True)
    if options.json:
        about = vars(device.report()) | {"notices": list(device.report().notices)}
        options.json.write_text(json.dumps({"device": about, "lines": lines}, indent=1))


def shown(line: dict[str, Any]) -> str:
    """A line of the table."""
    time = [f"{line['cpu_ms']:.2f}", f"{line['cpu_over_plain']:.2f}"] if "cpu_ms" in line else ["", ""]
    cells = [
        *(line["model"], str(line["width"]), line["way"]),
        *(f"{line[name] / MB:.2f}" for name in ("held_layer", "held_model", "moved", "least")),
        *(f"{line['moved'] / line['least']:.2f}", str(line["launches"]), *time),
    ]
    return f"| {' | '.join(cells)} |"


def rollback(way: str, width: int) -> Rollback:
    return {"tape": TAPE, "snapshots": Snapshots(max(2, width)), "checkpoint": Checkpoint()}[way]


class Round(NamedTuple):
    """What a round gave: the recurrence's inputs, y, and what the cache keeps."""

    inputs: GdnInputs
    y: mx.array
    future: RecurrentState


class Layer:
    """What stands between the projections of a layer of 16 key heads and `heads` value heads of 128, behind a convolution of 4."""

    def __init__(self, heads: int) -> None:
        self.shape = GdnShape(16, heads, 128, 128)
        self._rng = np.random.default_rng(0)
        self.weights = ConvWeights(
            self._draw(4, self.shape.conv_size).astype(mx.bfloat16),
            -mx.abs(self._draw(heads)),
            self._draw(heads),
        )
        mx.eval(self.weights.weight, self.weights.neg_a, self.weights.dt_bias)

    def _draw(self, *shape: int) -> mx.array:
        return mx.array(self._rng.standard_normal(shape, np.float32))

    def projected(self, width: int) -> mx.array:
        heads = self.shape.num_v_heads
        return self._draw(width, self.shape.conv_size + 128 * heads + 2 * heads).astype(mx.bfloat16)

    def fresh(self) -> RecurrentState:
        heads = self.shape.num_v_heads
        window = mx.zeros((1, 3, self.shape.conv_size), mx.bfloat16)
        return RecurrentState(mx.zeros((1, heads, 128, 128)), window)

    def inputs(
        self, projected: mx.array, past: RecurrentState, stood: Stood | None, rows: FlatRows
    ) -> tuple[GdnInputs, mx.array]:
        last = None
        if stood is not None and past.inputs is not None:
            last = KeptInputs(past.inputs, stood.rows, stood.kept)
        return conv_qkv(projected, past.window, self.weights, self.shape, RowLayout.of(rows), last)[:2]

    def verify(
        self, way: Rollback, projected: mx.array, past: RecurrentState, stood: Stood | None, rows: FlatRows
    ) -> Round:
        inputs, window = self.inputs(projected, past, stood, rows)
        y, state, held = way.verify(inputs, past, stood, RowLayout.of(rows), rows)
        return Round(inputs, y, RecurrentState(state, window, projected, held))

    def compiled(
        self, way: Rollback, width: int
    ) -> tuple[Callable[..., list[mx.array]], tuple[mx.array, ...]]:
        """A round behind another of the same width, as a function of arrays, and the arrays."""
        rows = FlatRows((width,))
        stood = Stood.of(rows, [width])
        past = self.verify(way, self.projected(width), self.fresh(), None, rows).future

        def step(
            projected: mx.array, state: mx.array, window: mx.array, last: mx.array, *held: mx.array
        ) -> list[mx.array]:
            _, y, new = self.verify(way, projected, RecurrentState(state, window, last, held), stood, rows)
            return [y, new.state, new.window, *new.held]

        given = (self.projected(width), past.state, past.window, past.inputs, *past.held)
        mx.eval(given, stood.kept, stood.dropped, stood.rows.starts)
        return mx.compile(step), given

    def plain(self, width: int) -> Callable[[], object]:
        """The same stretch over tokens that all stand, nothing pending."""
        rows, (state, window, *_) = FlatRows((width,)), self.fresh()
        projected = self.projected(width)
        mx.eval(projected, state, window)

        @mx.compile
        def step(projected: mx.array, state: mx.array, window: mx.array) -> list[mx.array]:
            inputs, after = self.inputs(projected, RecurrentState(state, window), None, rows)
            return [after, *gdn_facts(inputs, state, RowLayout.of(rows))]

        return lambda: mx.eval(step(projected, state, window))


def size(arrays: Sequence[mx.array | None]) -> int:
    return sum(x.nbytes for x in arrays if x is not None)


def counted(layer: Layer, name: str, width: int, num_layers: int) -> dict[str, Any]:
    """Bytes from shapes, evaluating nothing, and launches from the graph."""
    way, rows, fresh = rollback(name, width), FlatRows((width,)), layer.fresh()
    inputs, y, kept = layer.verify(way, layer.projected(width), fresh, None, rows)
    held = size([kept.state, kept.window, kept.inputs, *kept.held])
    least = size([*inputs, y]) + 2 * fresh.state.nbytes
    return {
        "held_layer": held,
        "held_model": held * num_layers,
        "moved": moved(name, inputs, y, fresh.state.nbytes, kept),
        "least": least,
        "launches": launches(layer, way, width),
    }


def moved(name: str, inputs: GdnInputs, y: mx.array, state: int, kept: RecurrentState) -> int:
    """A round behind one of the same width: each launch's operands once."""
    if name == "tape":
        return size([*inputs, *kept.held, y]) + 2 * state + kept.held[1].nbytes
    if name == "snapshots":
        return size([*inputs, y]) + state + kept.state.nbytes
    k, _, log_g, beta = kept.held
    masked = 2 * size([log_g, beta])
    again = size([k, *kept.held, y]) + 2 * state  # keys stand in for queries; its y is for nobody
    return masked + again + size([*inputs, y]) + 2 * state


# ---- launches


def stub(**_: Any) -> Callable[..., list[mx.array]]:
    """A kernel of which only the launch is left: one primitive that needs all inputs and gives all outputs."""

    def call(*, inputs: Sequence[Any], output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        blanks = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        mx.eval(blanks)
        return mx.depends(blanks, [x for x in inputs if isinstance(x, mx.array)])

    return call


@contextmanager
def stubbed() -> Iterator[None]:
    """Our launchers launch stubs, as if every self-check had passed."""
    names = ("gdn_round", "conv_qkv")
    launch.forget()
    launch._reports |= {n: launch.KernelReport(name=n, in_use=True, reason="a stub") for n in names}
    try:
        with launch.using(stub):
            yield
    finally:
        launch.forget()


def launches(layer: Layer, way: Rollback, width: int) -> int:
    """Primitives of a compiled round that Metal needs a kernel for."""
    with stubbed(), tempfile.TemporaryDirectory() as folder:
        step, given = layer.compiled(way, width)
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *step(*given))
        names = re.findall(r'\[label ="(\w+)", shape=rectangle\]', file.read_text())
    return sum(name not in VIEWS for name in names)


# ---- times


def times(layer: Layer, width: int, rounds: int) -> dict[str, dict[str, float]]:
    contestants: dict[str, Callable[[], object]] = {"plain": layer.plain(width)}
    for name in WAYS:
        step, given = layer.compiled(rollback(name, width), width)
        contestants[name] = lambda step=step, given=given: mx.eval(step(*given))
    taken = alternate(contestants, rounds=rounds)
    return {
        name: {"cpu_ms": 1e3 * median(taken, name), "cpu_over_plain": ratio(taken, name, "plain")}
        for name in WAYS
    }


if __name__ == "__main__":
    main()
