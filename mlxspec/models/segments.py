"""Runs layers cut at their attention: what lies between two attention cores is a *segment*, a function of arrays.

The core of an attention layer depends on the length of every row, so it is not compiled. What lies between two cores depends on widths
only: the rest of one attention layer, recurrent layers behind it, the beginning of the next attention layer. A model adds these pieces one
by one and runs what it has added. A plain step has one shape, so its segments are compiled whole; a verify comes in many shapes, so its
pieces are compiled one by one, each once for all layers of its form (runners.py). Knows no mathematics and no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.runners import Runners
from mlxspec.platform import device

_Call = Callable[..., tuple[mx.array, Any]]


class LayerPiece(NamedTuple):
    """A part of a layer without attention in it. run: a function of (layer, x, *arrays) that returns x and additional outputs; arrays may
    be in tuples, together with constants. key, shape: as in `Runners.get`; shape None: the number of tokens. is_alone: whether the piece
    has many shapes in plain steps too, so that it is not compiled together with others. num_launches: about how many kernels Metal launches
    for it, which `device.start` receives; 0: the device is not started."""

    key: Hashable
    run: _Call
    shape: Hashable = None
    is_alone: bool = False
    num_launches: int = 0


class _Added(NamedTuple):
    layer: int
    piece: LayerPiece
    arrays: tuple[Any, ...]
    keep: Callable[[Any], None] | None


class Segments:
    """The segments of a model: the parts between two attentions, compiled. layers: the layers that pieces name by number. beside: as in
    `Runners`."""

    def __init__(self, layers: Sequence[Any], beside: dict[str, mx.array] | None = None) -> None:
        self.layers, self.runners = layers, Runners(layers, beside)

    def begin(self, rows: FlatRows, taps: Iterable[int] = (), *, repeats: bool = True) -> SegmentRun:
        """Begin a forward over these rows, and return it. taps: layers whose output is kept. repeats: whether `rows.shape` alone determines
        the forward's graph."""
        return SegmentRun(self, rows, frozenset(taps), repeats)


class SegmentRun:
    """One forward, to which pieces are added and then run. taps: the output of each requested layer that has run."""

    def __init__(self, owner: Segments, rows: FlatRows, wanted: frozenset[int], repeats: bool) -> None:
        self._layers, self._runners, self._rows = owner.layers, owner.runners, rows
        self._wanted, self._repeats, self._num_cold = wanted, repeats, owner.runners.num_cold
        self._added: list[_Added] = []
        self.taps: dict[int, mx.array] = {}

    @property
    def is_warm(self) -> bool:
        """Return whether nothing was compiled in this forward."""
        return self._runners.num_cold == self._num_cold

    def add(
        self, layer: int, piece: LayerPiece, *arrays: Any, keep: Callable[[Any], None] | None = None
    ) -> None:
        """Add a piece after the pieces added before. arrays: its further arguments. keep: a function that receives the piece's additional
        outputs."""
        self._added.append(_Added(layer, piece, arrays, keep))

    def through(self, x: mx.array) -> tuple[mx.array, Any]:
        """Run the added pieces on x. Return x after them and the additional outputs of the last piece."""
        added, self._added = self._added, []
        wanted = [one.layer in self._wanted for one in added]
        if self._rows.max_width == 1 and not any(one.piece.is_alone for one in added):
            key = tuple((one.layer, one.piece.key) for one in added), tuple(wanted)
            calls: list[_Call] = [partial(one.piece.run, self._layers[one.layer]) for one in added]
            whole = self._runners.get(key, partial(_one_by_one, calls, wanted), self._rows)
            x, outs, streams = whole(x, [one.arrays for one in added])
            _start(x, sum(one.piece.num_launches for one in added))
        else:
            calls = [self._call(one.layer, one.piece) for one in added]
            x, outs, streams = _one_by_one(calls, wanted, x, [one.arrays for one in added])
        named = (one.layer for one, is_wanted in zip(added, wanted, strict=True) if is_wanted)
        self.taps.update(zip(named, streams, strict=True))  # the last piece of a layer gives its output
        for one, out in zip(added, outs, strict=True):
            if one.keep is not None:
                one.keep(out)
        return x, outs[-1]

    def _call(self, layer: int, piece: LayerPiece) -> _Call:
        """Return a piece of a layer as a function of x and arrays, compiled where its shape repeats. A call also starts the device."""
        call: _Call = partial(piece.run, self._layers[layer])
        if self._repeats:
            shape = self._rows.num_tokens if piece.shape is None else piece.shape
            call = self._runners.of_layer(piece.key, layer, piece.run, self._rows, shape=shape)

        def told(x: mx.array, *arrays: Any) -> tuple[mx.array, Any]:
            x, out = call(x, *arrays)
            _start(x, piece.num_launches)
            return x, out

        return told


def _one_by_one(
    calls: Sequence[_Call],
    wanted: Sequence[bool],
    x: mx.array,
    given: Sequence[tuple[Any, ...]],
) -> tuple[mx.array, list[Any], list[mx.array]]:
    """Call the pieces one after the other. Return x after all, the additional outputs of each piece, and x after each piece that `wanted`
    marks. given: the arrays of each piece."""
    outs, streams = [], []
    for call, is_wanted, arrays in zip(calls, wanted, given, strict=True):
        x, out = call(x, *arrays)
        outs.append(out)
        if is_wanted:
            streams.append(x)
    return x, outs, streams


def _start(x: mx.array, num_launches: int) -> None:
    if num_launches:
        device.start(x, num_launches=num_launches)
