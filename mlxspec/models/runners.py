"""Functions of arrays that a model runs again and again, compiled once their shapes have repeated often enough to pay for it.

On a GPU fewer launches pay at once, and so they do for plain steps on a CPU. A verify comes in many shapes, by its own width and by what
stands of the round before; compiling one costs a CPU about two rounds' savings, so there a shape is run by single operations until it has
come up HOT_AFTER times. That may be mixed only where fused loops round as single operations do, which on x86-64 they do; on other CPUs they
contract to multiply-adds, so everything up to a width is compiled, or nothing. Knows shapes; knows no layers.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx

from mlxspec import device
from mlxspec.kernels.flat import FlatRows

# tokens a row, and of all rows: wider forwards rarely repeat a shape, and building their graph is a small part of them
COMPILE_AT_MOST, COMPILE_ALL_AT_MOST = 64, 256
# demo model: compiling a verify of 4 to 26 tokens takes 5 to 30 ms more than running it, and saves 5 to 15 ms each time from then on
HOT_AFTER = 2
_SHAPES_AT_MOST = 512  # compiled ones that are kept: ragged rounds could make new ones forever

FUSED_IS_EXACT = platform.machine().lower() in ("x86_64", "amd64")


class Runners:
    """Compiled functions of one model. Equal forwards have equal bits, whether or not they were compiled.

    num_cold: how many of those handed out will not be what they are the next times: they compile, or are to be compiled once hot.
    """

    def __init__(self) -> None:
        self.num_cold = 0
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._seen: Counter[Hashable] = Counter()

    def get(
        self,
        key: Hashable,
        run: Callable[..., Any],
        rows: FlatRows,
        *,
        deferred: int = 0,
        is_shaped: bool = True,
    ) -> Callable[..., Any]:
        """`run`, or what was compiled of an equal one.

        key, with the rows' shape and `deferred`, tells everything that run's graph depends on. deferred: how many tokens' inputs of the
        last forward come along, 0 for none. is_shaped: False where every single width shapes the graph.
        """
        if not is_shaped or not device.compile_enabled():
            return run
        if rows.max_width > COMPILE_AT_MOST or rows.num_tokens > COMPILE_ALL_AT_MOST:
            return run
        whole = (key, rows.shape, deferred)
        if whole in self._compiled:
            return self._compiled[whole]
        if len(self._compiled) >= _SHAPES_AT_MOST:
            return run
        self.num_cold += 1
        if not self._is_due(whole, rows, deferred):
            return run
        self._compiled[whole] = mx.compile(run)
        return self._compiled[whole]

    def _is_due(self, whole: Hashable, rows: FlatRows, deferred: int) -> bool:
        is_plain = rows.max_width == 1 and not deferred
        if is_plain or device.backend() != "cpu" or not FUSED_IS_EXACT:
            return True
        self._seen[whole] += 1
        return self._seen[whole] > HOT_AFTER
