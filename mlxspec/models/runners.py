"""Functions of arrays that a model runs again and again, compiled when a shape first comes up.

Two kinds: functions of a model, whose weights are built in, and functions of a layer, which layers of one form share (forms.py). A plain
step has one shape, so as much as possible of it is compiled at once; a verify comes in many, by its own widths and by what stands of the
round before, so it is compiled layer by layer. Everything up to a width is compiled, or nothing: on some machines fused loops round
otherwise than single operations do. Knows shapes; knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.forms import Forms
from mlxspec.platform import device

# tokens a row, and of all rows: wider forwards rarely repeat a shape, and building their graph is a small part of them. One row's
# without a GPU is compiled all the same: layer by layer that takes less than fused loops save, even the first time
COMPILE_AT_MOST, COMPILE_ALL_AT_MOST = 64, 256
# compiled ones that are kept, the oldest go first: ragged rounds could make new ones forever
_SHAPES_AT_MOST = 512
_all: WeakSet[Runners] = WeakSet()


def retrace() -> None:
    """Drop all compiled functions of all models, so that they are compiled again when they are next needed. A compiled function keeps the
    operations with which it was traced."""
    for runners in _all:
        runners.clear()


class Runners:
    """The compiled functions of one model. Equal forwards have equal bits, whenever their functions were compiled.

    num_cold: how many returned functions were new, so that they compile when they first run.
    """

    def __init__(self, layers: Sequence[nn.Module] = (), beside: dict[str, mx.array] | None = None) -> None:
        """Prepare an empty store of functions. layers: the layers that `of_layer` names by number. beside: arrays of a forward that
        functions read although they are no arguments."""
        self.num_cold = 0
        self._beside = {} if beside is None else beside
        self._layers, self._forms = layers, Forms(layers)
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        _all.add(self)

    def clear(self) -> None:
        """Drop all compiled functions."""
        self._functions.clear()

    def get(
        self,
        key: Hashable,
        run: Callable[..., Any],
        rows: FlatRows,
        *,
        shape: Hashable = None,
    ) -> Callable[..., Any]:
        """Return `run` compiled, or the function that was compiled for the same key and shape; `run` itself for forwards that are not
        compiled.

        key and shape must determine the graph of `run`. shape: None for the shape of `rows`.
        """
        if not self._compiles(rows):
            return run
        return self._kept((key, rows.shape if shape is None else shape), run)

    def of_layer(
        self,
        key: Hashable,
        i: int,
        run: Callable[..., Any],
        rows: FlatRows,
        *,
        shape: Hashable = None,
    ) -> Callable[..., Any]:
        """Return run(layer i, ...) as a function of its other arguments, compiled as by `get`. Layers that differ in their parameters only
        share a compiled function."""
        if not self._compiles(rows):
            return partial(run, self._layers[i])
        whole = key, self._forms.form(i), rows.shape if shape is None else shape
        found = self._kept(whole, self._forms.on(i, run))
        return partial(found, self._forms.weights(i))

    def _compiles(self, rows: FlatRows) -> bool:
        return rows.repeats and (_are_few(rows) or _is_worth_compiling(rows)) and device.compile_enabled()

    def _kept(self, whole: Hashable, run: Callable[..., Any]) -> Callable[..., Any]:
        kept = self._functions
        if self._beside:
            whole = whole, *self._beside
        found = kept.get(whole)
        if found is None:
            if len(kept) >= _SHAPES_AT_MOST:
                del kept[next(iter(kept))]
            self.num_cold += 1
            found = kept[whole] = mx.compile(run, inputs=self._beside or None)
        return found


def _are_few(rows: FlatRows) -> bool:
    return rows.max_width <= COMPILE_AT_MOST and rows.num_tokens <= COMPILE_ALL_AT_MOST


def _is_worth_compiling(rows: FlatRows) -> bool:
    return rows.num_rows == 1 and not device.has_gpu()
