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
    """A part of a layer without an attention core in it. run: (layer, x, *arrays) -> x and what else there is; arrays may lie in tuples,
    beside constants. key, shape: as `Runners` has them; shape None: the number of tokens. is_alone: it comes in many shapes in plain steps
    too, so it is not compiled with others. num_launches: about so many kernels that Metal launches, for `device.start`; 0: the device is
    not told."""

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
    """layers: those that pieces are of, by number. beside: as `Runners` has it."""

    def __init__(self, layers: Sequence[Any], beside: dict[str, mx.array] | None = None) -> None:
        self.layers, self.runners = layers, Runners(layers, beside)

    def begin(self, rows: FlatRows, taps: Iterable[int] = (), *, repeats: bool = True) -> SegmentRun:
        """One forward over these rows. taps: layers whose output is wanted. repeats: whether `rows.shape` is all that shapes its graph."""
        return SegmentRun(self, rows, frozenset(taps), repeats)


class SegmentRun:
    """One forward. taps: the output of each layer that was asked for and has run."""

    def __init__(self, owner: Segments, rows: FlatRows, wanted: frozenset[int], repeats: bool) -> None:
        self._layers, self._runners, self._rows = owner.layers, owner.runners, rows
        self._wanted, self._repeats, self._num_cold = wanted, repeats, owner.runners.num_cold
        self._added: list[_Added] = []
        self.taps: dict[int, mx.array] = {}

    @property
    def is_warm(self) -> bool:
        """Whether nothing was compiled in this forward."""
        return self._runners.num_cold == self._num_cold

    def add(
        self, layer: int, piece: LayerPiece, *arrays: Any, keep: Callable[[Any], None] | None = None
    ) -> None:
        """Add a piece after those added before. keep: receives what the piece gives in addition to x."""
        self._added.append(_Added(layer, piece, arrays, keep))

    def through(self, x: mx.array) -> tuple[mx.array, Any]:
        """Run what has been added: x behind it, and what the last piece gives beside x."""
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
        """A piece of a layer as a function of arrays, compiled where its shape repeats; the device is told of it when it is called."""
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
    """x behind all calls, what each gives beside it, and x behind each of those that are wanted."""
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
