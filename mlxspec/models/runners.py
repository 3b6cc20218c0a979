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
    """Compile every function of every model anew when it is next asked for: those that exist keep the operations they were traced with."""
    for runners in _all:
        runners.clear()


class Runners:
    """Compiled functions of one model. Equal forwards have equal bits, whenever they were compiled.

    num_cold: how many of those handed out were new, and compile when they run.
    """

    def __init__(self, layers: Sequence[nn.Module] = (), beside: dict[str, mx.array] | None = None) -> None:
        """layers: those that `of_layer` knows by number. beside: arrays of a forward that functions read and are not given."""
        self.num_cold = 0
        self._beside = {} if beside is None else beside
        self._layers, self._forms = layers, Forms(layers)
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        _all.add(self)

    def clear(self) -> None:
        """Forget what is compiled."""
        self._functions.clear()

    def get(
        self,
        key: Hashable,
        run: Callable[..., Any],
        rows: FlatRows,
        *,
        shape: Hashable = None,
    ) -> Callable[..., Any]:
        """`run`, or what was compiled of an equal one.

        key and `shape` tell everything that run's graph depends on. shape: None for the rows' own.
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
        """run(layer i, ...) as a function of its other arguments, or what was compiled of it for a layer of that form. As `get` else."""
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
